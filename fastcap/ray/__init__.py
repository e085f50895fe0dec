"""fastcap for Ray: experiments that hold dead handles are restored."""

from fastcap.ray.restoring import DeadPart, restore_trainer, restore_tuner

__all__ = ["DeadPart", "restore_trainer", "restore_tuner"]
