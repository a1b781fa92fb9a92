"""Mistakes in how a command was called, as one sentence: the option, its value, its bound, and what to write instead.

The errors are those of typer, whose classes differ between its versions: they are distinguished by their attributes.
"""

from collections.abc import Sequence
from typing import Any


def explain_usage(error: Any, args: Sequence[str]) -> str | None:
    """Say what is wrong with an option; None where typer's own words are better. args: what was typed."""
    if getattr(error, "param", None) is not None:
        return _explain_value(error)
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None:
        return _explain_unknown(error.option_name, error.ctx.command, args)
    return None


def _explain_value(error: Any) -> str | None:
    """Explain a value that pydantic has refused: "--worlds must be >= 1, got -3; leave it out for 200"."""
    if type(error.__cause__).__name__ != "ValidationError":
        return None
    from dfca.base.validation import demand

    problem, param = error.__cause__.errors()[0], error.param
    default = param.show_default if isinstance(param.show_default, str) else param.default
    default = f"{default:g}" if isinstance(default, float) else default
    advice = "" if default is None or param.required else f"; leave it out for {default}"
    bound, got = demand(problem), str(problem["input"])
    got = got if bound.startswith((">", "<")) else f'"{got}"'
    return f"{max(param.opts, key=len)} must be {bound}, got {got}{advice}"


def _explain_unknown(option: str, command: Any, args: Sequence[str]) -> str | None:
    """Explain an option that is no option of a command but a key of the experiment that it runs."""
    if not {"experiment", "set_"} <= {param.name for param in command.params}:
        return None
    from dfca.experiment.reference import reference

    name = option.lstrip("-").replace("-", "_")
    known = [key.name for key in reference()]
    keys = [name] if name in known else [key for key in known if key.endswith(f".{name}")]
    if not keys:
        return None
    # Several algorithms may have the same option: one line for all of them.
    keys = [key for key in keys if not key.startswith("algorithm.")] or [f"algorithm.NAME.{name}"]
    value = _value_of(option, args)
    if name == "clients" and "nodes" in {param.name for param in command.params}:
        return f"dfca {command.name} has no option {option}; how many devices there are is --nodes {value}"
    ways = " or ".join(f"--set {key}={value}" for key in keys)
    return f"dfca {command.name} has no option {option}; it is a key of the experiment: {ways}"


def _value_of(option: str, args: Sequence[str]) -> str:
    """Find the value that was typed behind an option.

    >>> _value_of("--clients", ["run", "soft", "--clients", "3"]), _value_of("--clients", ["--clients=3"])
    ('3', '3')
    """
    for word, following in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            value = value if equals else following
            return value if value and not value.startswith("--") else "VALUE"
    return "VALUE"
