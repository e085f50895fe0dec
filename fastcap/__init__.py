"""What is in this pickle, why is it there, and how to get it out."""

from fastcap.errors import FastcapError, PayloadError

__version__ = "0.1.0"
__all__ = ["FastcapError", "PayloadError", "__version__"]
