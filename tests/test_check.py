"""`fastcap.check`: what it lets pass, and what its exceptions say."""

import functools
import pickle
import threading
from dataclasses import replace

import pytest

import fastcap
from fastcap import checking
from fastcap.errors import FastcapError, NotPicklable, PayloadError, PayloadTooLarge
from fastcap.report import Finding


class Trainer:
    def __init__(self):
        self.data = bytes(2_000_000)
        self.rate = 0.1

    def make_step(self):
        def step(x):
            return x * self.rate

        return step


def test_within_its_size():
    report = fastcap.check(Trainer().make_step(), "2 MiB")
    assert report.payload_size > 2_000_000
    assert report.find("step<closure self>.data") is not None
    assert fastcap.check(Trainer()).payload_size == fastcap.analyze(Trainer()).payload_size


def test_exactly_its_size():
    size = fastcap.analyze([1, 2]).payload_size
    fastcap.check([1, 2], size)
    with pytest.raises(PayloadTooLarge):
        fastcap.check([1, 2], max_size=size - 1)


def test_message_has_verdict_and_paths():
    with pytest.raises(PayloadTooLarge) as caught:
        fastcap.check(Trainer().make_step(), "1 MiB")
    error = caught.value
    verdict, *rest = str(error).splitlines()
    assert verdict.startswith("step pickles to 1.9 MiB (2,0")
    assert verdict.endswith(" B), more than max_size, 1.0 MiB")
    assert any("over max_size (1.0 MiB) 1.9 times" in line for line in rest)
    assert any("step<closure self>.data" in line for line in rest)
    assert any("Trainer captured as `self`" in line for line in rest)
    assert error.max_size == 1 << 20
    assert error.payload_size == error.report.payload_size
    assert isinstance(error, (FastcapError, ValueError))
    assert len(rest) < 20


def test_name_is_the_root_of_paths():
    with pytest.raises(PayloadTooLarge, match=r"job<closure self>\.data"):
        fastcap.check(Trainer().make_step(), 10, name="job")


@pytest.mark.parametrize(
    "make", [threading.Lock, lambda: [threading.Lock()], lambda: functools.partial(open, threading.Lock())]
)
def test_what_the_pickler_raises_becomes_not_picklable(make):
    with pytest.raises(NotPicklable) as caught:
        fastcap.check(make(), "1 GiB")
    assert isinstance(caught.value, TypeError)
    assert str(caught.value).startswith("obj cannot be pickled")
    assert "lock" in str(caught.value)


class Stubborn:
    def __reduce__(self):
        raise ZeroDivisionError("first line\nsecond \x1b[31m line")


def test_any_exception_of_the_object_is_the_objects():
    with pytest.raises(NotPicklable) as caught:
        fastcap.check({"a": Stubborn()}, name="cfg")
    first = str(caught.value).splitlines()[0]
    assert first.startswith("cfg cannot be pickled")
    assert str(caught.value).replace("\n", "").isprintable()


def test_interrupts_pass(monkeypatch):
    monkeypatch.setattr(Stubborn, "__reduce__", lambda self: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        fastcap.check(Stubborn())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"flavor": "cloudpickel"}, ValueError),
        ({"protocol": 99}, ValueError),
        ({"protocol": "high"}, TypeError),
        ({"max_size": "many"}, ValueError),
        ({"max_size": -1}, ValueError),
        ({"max_size": 1.5}, TypeError),
        ({"max_size": True}, TypeError),
    ],
)
def test_wrong_arguments_are_not_blamed_on_the_object(options, error):
    with pytest.raises(error) as caught:
        fastcap.check([1], **options)
    assert not isinstance(caught.value, FastcapError)


def finding(code, severity="error"):
    return Finding(code, severity, "obj[0]", 0, "a lock cannot be pickled", "make it in __setstate__")


@pytest.fixture
def with_findings(monkeypatch):
    """Lets analyses report the given findings."""

    def give(*rows):
        def analyze(*args, **options):
            report = fastcap.analyze(*args, **options)
            details = replace(report.details, findings=rows)
            return report.changed(make_details=lambda: details)

        monkeypatch.setattr(checking, "analyze", analyze)

    return give


def test_findings_that_say_it_cannot_be_pickled(with_findings):
    rows = finding("FC101"), finding("FC102"), finding("FC201"), finding("FC103", "note")
    with_findings(*rows)
    with pytest.raises(NotPicklable) as caught:
        fastcap.check([1], 0)  # rather than PayloadTooLarge
    assert caught.value.findings == rows[:2]
    assert caught.value.report.payload_size > 0
    assert str(caught.value).startswith("obj cannot be pickled, for 2 parts of it\n")
    assert "FC101" in str(caught.value)


def test_other_findings_do_not_matter(with_findings):
    with_findings(finding("FC201"), finding("FC101", "warning"))
    assert len(fastcap.check([1]).findings) == 2


@pytest.mark.parametrize(
    "error",
    [
        PayloadError("broken", 7),
        PayloadTooLarge("too large", 10, 5, fastcap.analyze(1)),
        NotPicklable("cannot", (finding("FC101"),), fastcap.analyze(1)),
    ],
)
def test_errors_can_be_sent_to_other_processes(error):
    loaded = pickle.loads(pickle.dumps(error))
    assert type(loaded) is type(error)
    assert str(loaded) == str(error)
    kept = {name: value for name, value in vars(error).items() if name != "report"}
    assert {name: getattr(loaded, name) for name in kept} == kept
    assert getattr(loaded, "report", None) is None
