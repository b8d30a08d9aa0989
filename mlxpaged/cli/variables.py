"""Values that came from an MLXPAGED_* variable, named as such where they are refused. Owns those words alone."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from ..errors import ConfigError


class NamingVariables(TyperCommand):
    """A command whose errors about a flag name the variable that set it: a person may not know that there is one."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Runs the command. Raises what it raises."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            error.args = (_with_variable(ctx, str(error)),)
            raise


def _with_variable(context: typer.Context, message: str) -> str:
    """The message with the variable behind the flag that it begins with, where the flag got its value there."""
    flag, _, rest = message.partition(" ")
    for one in context.command.params:
        source = context.get_parameter_source(str(one.name))
        if flag in one.opts and isinstance(one.envvar, str) and source is not None and source.name == "ENVIRONMENT":
            return f"{flag} (from {one.envvar}) {rest}"
    return message
