"""Chat templates: equal to transformers' own rendering, and what happens when a template says no."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

import pytest

from mlxpaged.chat.messages import Messages
from mlxpaged.chat.template import ChatTemplate
from mlxpaged.errors import RequestError
from tests.scripted import CHATML

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ message.role }}]{{ message.content | trim }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Refuses a system role and neighbours of one role, as several well-known templates do."""

DROPS_SYSTEM = (
    "{% for message in messages if message.role != 'system' %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)

TOOLS = """{%- if tools is not none and tools %}
    {{- "Tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {{- "<a>" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {%- endgeneration %}
    {%- else %}
    <{{ message.role }}>{{ message.content }}
    {%- endif %}
    {%- set ns = namespace(last=loop.last) %}
    {%- if ns.last %}{% break %}{% endif %}
{%- endfor %}
{{ strftime_now("%Y") | length }}"""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, TOKENS).render(Messages(messages, **options))


def test_a_plain_template_is_rendered_with_its_special_tokens() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", user("hi")) == "<s>hi</s>"


@pytest.mark.parametrize("source", [CHATML, TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("generate", [True, False])
def test_the_text_is_what_transformers_renders(source: str, generate: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"where": "<Köln & 'Bonn'>"}}}
    called = assistant("", tool_calls=[call]) if source == TOOLS else assistant("well")
    messages = [system("be <brief>"), user("grüß dich\n"), called, user("x")]
    tools = [{"type": "function", "function": {"name": "f", "description": "a 'b' <c>"}}]
    rendered = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=generate, **TOKENS
    )
    expected = rendered[0][0] if isinstance(rendered, tuple) else rendered
    ours = render(source, *messages, template_kwargs={"tools": tools}, add_generation_prompt=generate)
    assert ours == expected


def test_a_template_that_asks_for_tools_finds_none() -> None:
    assert render("{% if tools is not none %}tools{% else %}no tools{% endif %}", user("a")) == "no tools"


def test_extra_variables_reach_the_template_but_cannot_replace_the_messages() -> None:
    source = "{% if enable_thinking is false %}quick {% endif %}{{ messages[0].content }}"
    extra = {"enable_thinking": False, "messages": [user("other")]}
    assert render(source, user("mine"), template_kwargs=extra) == "quick mine"


def test_the_date_is_the_clock_s() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2025, 3, 9))
    assert template.render(Messages((user("a"),))) == "09 Mar 2025"


def test_a_system_role_that_is_refused_goes_into_the_first_user_turn(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(STRICT, TOKENS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            text = template.render(Messages((system("Be brief."), user("hi"))))
    assert text == "<s>[user]Be brief.\n\nhi[assistant]"
    assert [record.message for record in caplog.records] == [
        "the model's chat template refuses these messages as they are: "
        "the system message was put into the first user turn"
    ]


def test_a_system_role_that_is_silently_dropped_is_kept_all_the_same() -> None:
    assert render(DROPS_SYSTEM, system("Be brief."), user("hi")) == "<user>Be brief.\n\nhi"


def test_a_template_that_rewrites_the_system_text_is_left_alone() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content.replace('/no_think', '') }};{% endfor %}"
    assert render(source, system("/no_think calm"), user("hi")) == "system: calm;user:hi;"


def test_neighbours_that_are_refused_are_merged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        text = render(STRICT, user("a"), user("b"), assistant("c"), user("d"))
    assert text == "<s>[user]a\n\nb[assistant]c[user]d[assistant]"
    assert "consecutive turns of one role were merged" in caplog.text


def test_neighbours_that_are_accepted_are_not_merged() -> None:
    assert render("{% for m in messages %}({{ m.content }}){% endfor %}", user("a"), user("b")) == "(a)(b)"


def test_a_refusal_that_nothing_helps_is_told_in_the_templates_own_words() -> None:
    with pytest.raises(RequestError) as refused:
        render(STRICT, assistant("I begin"), user("b"))
    assert str(refused.value) == "Conversation roles must alternate user/assistant/user/assistant/..."
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ nope.x }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(RequestError, match="the model's chat template failed"):
        render(source, user("a"))


def test_a_source_that_is_no_template_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(("comment", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_developer_is_system_unless_the_template_knows_it(comment: str, role: str) -> None:
    source = comment + "{{ messages[0].role }}: {{ messages[0].content }}"
    assert render(source, {"role": "developer", "content": "x"}, user("a")) == f"{role}: x"


@pytest.mark.parametrize("ending", ["Once upon", "Once upon ", ""])
def test_a_final_message_is_continued_where_it_ends(ending: str) -> None:
    text = render(CHATML, user("story"), assistant(ending), add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nstory<|im_end|>\n<|im_start|>assistant\n{ending}"


def test_a_final_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="cannot be continued"):
        render(
            "{{ messages[0].content }}",
            user("a"),
            assistant("b"),
            add_generation_prompt=False,
            continue_final_message=True,
        )


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}


def test_tools_reach_a_template_that_knows_them() -> None:
    assert '"name": "weather"' in render(TOOLS, user("hi"), tools=(WEATHER,))
    assert ChatTemplate(TOOLS, TOKENS).takes_tools and not ChatTemplate(CHATML, TOKENS).takes_tools


def test_a_template_without_tools_gets_them_as_text() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    text = render(CHATML, system("Be brief."), user("hi"), assistant(None, tool_calls=[CALL]), result, tools=(WEATHER,))
    before, _, after = text.partition("<|im_start|>user\nhi<|im_end|>\n")
    assert before.startswith("<|im_start|>system\nBe brief.\n\n") and '{"name": "weather"' in before
    assert after == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_ids_of_calls_are_cut_to_nine_letters_where_the_template_demands_it() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have length 9') }}{% endif %}[{{ c.id }}]{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}{{ tools }}"
    )
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    text = render(source, user("hi"), assistant("", tool_calls=[CALL]), result)
    assert text[1:10].isalnum() and text == f"[{text[1:10]}]({text[1:10]})None"


def test_thinking_of_a_call_reaches_a_template_that_names_it_so() -> None:
    source = "{% for message in messages %}{{ message.thinking }}|{% endfor %}{{ tools }}"
    called = assistant("", tool_calls=[CALL], reasoning_content="hm")
    assert render(source, user("hi"), called, assistant("yes", reasoning_content="ah")) == "|hm||None"
