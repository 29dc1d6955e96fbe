"""The errors of the package travel: between processes as pickles, between ranks as plain values."""

from __future__ import annotations

import pickle

import everstep
import pytest
from everstep import errors


def tree(cls: type[errors.EverstepError] = errors.EverstepError) -> list[type[errors.EverstepError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in tree(child))]


def public(cls: type) -> bool:
    return cls.__module__ == "everstep.errors" and not cls.__name__.startswith("_")


@pytest.mark.parametrize(
    "cls", [c for c in tree() if c.__module__.startswith("everstep.")], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling(cls: type[errors.EverstepError], protocol: int) -> None:
    error = cls("what", found="this", expected="that", hint="Do.", step=3, ranks=[1, 2], key="a/b")
    again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301
    assert type(again) is cls and str(again) == str(error) == "what; found: this; expected: that. Do."
    assert again.step == 3 and again.ranks == [1, 2] and again.key == "a/b" and again.fields == error.fields
    assert (again.message, again.found, again.expected, again.hint) == ("what", "this", "that", "Do.")


@pytest.mark.parametrize("cls", [c for c in tree() if public(c)], ids=lambda c: c.__name__)
def test_every_public_error_survives_the_wire(cls: type[errors.EverstepError]) -> None:
    again = errors.from_wire(cls("what", found=3, step=7).to_wire())
    assert type(again) is cls and again.step == 7 and str(again) == "what; found: 3"


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    drawn = [line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert sorted(drawn) == sorted(c.__name__ for c in tree() if public(c) and c is not errors.EverstepError)


def test_the_public_names() -> None:
    assert sorted(everstep.__all__) == dir(everstep)
    for name in everstep.__all__:
        assert getattr(everstep, name) is not None
