"""The colours of code. Owns one table from kinds of token to the theme's own colours."""

from __future__ import annotations

from pygments.token import Token  # type: ignore[import-untyped]
from textual.highlight import HighlightTheme


class CodeColours(HighlightTheme):
    """Textual's table without underlines: in a chat they read as links."""

    STYLES = {  # noqa: RUF012 - the base class declares it so
        **HighlightTheme.STYLES,
        Token.Comment: "$foreground-muted italic",
        Token.Name: "",
        Token.Name.Function: "$text-primary",
        Token.Name.Function.Magic: "$text-primary",
        Token.Name.Class: "$text-warning",
        Token.Name.Tag: "$text-primary",
        Token.Keyword: "$text-secondary",
        Token.Keyword.Namespace: "$text-secondary",
        Token.Keyword.Constant: "$text-warning",
        Token.Keyword.Type: "$text-accent",
        Token.Operator: "",
        Token.Operator.Word: "$text-secondary",
        Token.Literal.String: "$text-success",
        Token.Literal.String.Double: "$text-success",
        Token.Literal.String.Doc: "$text-success italic",
    }
