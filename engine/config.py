"""The user's configuration and metrics as plain, exact values: checked before any byte is written."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping
from typing import Any

from .errors import BadOption, ConfigChanged, StepOrder
from .format.constants import NUMBER_MAX
from .format.hashing import hexdigest

DEPTH_MAX = 32
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""Larger numbers are kept as texts, exact too: small messages have no place for them."""
SHOWN_MAX = 20


def plain_config(config: Any) -> dict[str, Any] | None:
    """``config`` (a mapping, a dataclass, a namespace) as nested dicts, lists, texts, numbers, booleans and None.

    Paths and enums become texts. Raises BadOption naming the path of anything else.
    """
    if config is None:
        return None
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    elif not isinstance(config, Mapping) and hasattr(config, "__dict__"):
        config = vars(config)
    if not isinstance(config, Mapping):
        raise BadOption("config= must be a mapping, a dataclass or a namespace", found=type(config).__name__)
    plain = _plain(config, "config", 0)
    assert isinstance(plain, dict)
    return plain


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics as texts and exact numbers: numpy and torch scalars become Python's."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise BadOption("metrics= must be a mapping", found=type(metrics).__name__)
    return {str(key): _plain(value, f"metrics[{key!r}]", 0) for key, value in metrics.items()}


def config_hash(config: dict[str, Any] | None) -> str | None:
    """Hash of the configuration; key order does not matter."""
    if config is None:
        return None
    return hexdigest(json.dumps(config, sort_keys=True, ensure_ascii=True).encode())


def config_changes(before: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, list[Any]]:
    """What differs, as dotted key -> [before, now]; a key that is missing on one side shows as "(absent)"."""
    left, right = dict(_leaves(before or {}, "")), dict(_leaves(now or {}, ""))
    return {
        key: [left.get(key, "(absent)"), right.get(key, "(absent)")]
        for key in sorted(left.keys() | right.keys())
        if left.get(key, _ABSENT) != right.get(key, _ABSENT) or (key in left) != (key in right)
    }


_ABSENT = object()


def check_config(
    before: dict[str, Any] | None, now: dict[str, Any] | None, *, reason: str | None, step: int
) -> dict[str, list[Any]]:
    """The changes of the configuration since the checkpoint. Raises ConfigChanged unless there are none, or a
    ``reason`` is given; a side that never had a configuration is no change."""
    if before is None or now is None or config_hash(before) == config_hash(now):
        return {}
    changes = config_changes(before, now)
    if reason:
        return changes
    shown = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in list(changes.items())[:SHOWN_MAX]]
    if len(changes) > SHOWN_MAX:
        shown.append(f"and {len(changes) - SHOWN_MAX} more")
    raise ConfigChanged(
        f"the configuration is not the one that step {step} was written with",
        found="; ".join(shown),
        expected="the same configuration",
        hint='If the change is meant, load with config_reason="why"; the new incarnation records it.',
        step=step,
    )


def _leaves(value: Any, path: str) -> Any:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _plain(value: Any, path: str, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise BadOption(f"{path} is nested too deeply", expected=f"at most {DEPTH_MAX} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if value != value.encode(errors="replace").decode():
            raise BadOption(f"{path} is no text", found=repr(value), expected="texts without lone surrogates")
        return str(value)
    if isinstance(value, int):
        return int(value) if INT_MIN <= value <= INT_MAX else str(int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item, path, depth + 1) for item in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value), path, depth + 1)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) in ((), None):
        return _plain(item(), path, depth + 1)
    if hasattr(value, "__fspath__"):
        return str(value)
    if hasattr(value, "value") and hasattr(value, "name"):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    raise BadOption(
        f"{path} is not a plain value",
        found=type(value).__name__,
        expected="texts, numbers, booleans, None, lists and mappings of them",
    )


def plain_step(step: Any) -> int:
    """A step as an int, from anything that is a whole number (numpy's, too). Raises StepOrder."""
    try:
        number = operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if isinstance(step, bool) or not 0 <= number <= NUMBER_MAX:
        raise StepOrder(
            "a step is a whole number, zero or more", found=repr(step), expected=f"0 to {NUMBER_MAX}"
        )
    return number


def check_kind(name: str, value: object, cls: type) -> None:
    """BadOption unless ``value`` is a ``cls``, or None."""
    if value is not None and not isinstance(value, cls):
        raise BadOption(
            f"{name}= is of another type", found=repr(value), expected=f"everstep.{cls.__name__}(...)"
        )
