"""`jaxspec.chat_template`: templates write what transformers writes, and no template takes time or memory without end."""

import resource
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxspec.chat_template.budget import Budget, TemplateTooExpensiveError
from jaxspec.chat_template.template import ChatTemplate
from jaxspec.errors import InvalidRequestError, JaxspecError, ModelFormatError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HI = [{"role": "user", "content": "hi"}]

# What templates of today's model families are made of.
FAMILIES = {
    "roles by name": (
        "{%- for m in messages -%}{%- if loop.first and messages[0]['role'] != 'system' -%}"
        "{{ '<|system|>default<|end|>' }}{%- endif -%}"
        "{{ '<|' + m['role'] + '|>' }}"
        "{%- if m['content'] is string -%}{{- m['content'] + '<|end|>' -}}{%- else -%}"
        "{%- for part in m['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
    ),
    "a system prompt that is gathered": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% set ns = namespace(system='', first=true) %}{%- for m in messages %}{% if m.role == 'system' %}"
        "{%- set ns.system = ns.system + ('' if ns.first else '\n\n') + m.content %}{% set ns.first = false %}"
        "{%- endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
        "{% for m in messages if m.role != 'system' %}{% set content = m['content'] %}"
        "{% if m.role == 'assistant' and '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}"
        "{% endif %}{{ m.role ~ ': ' ~ content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    ),
    "the last question, from the end": (
        "{%- set ns = namespace(tools=true, last=messages|length - 1) %}{%- for m in messages[::-1] %}"
        "{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.tools and m.role == 'user' and not(m.content.startswith('<r>') and m.content.endswith('</r>')) %}"
        "{%- set ns.tools = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
        "{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>' + thought.strip('\n') + '</think>' }}"
        "{%- endif %}{{ '<|im_start|>' + m.role + '\n' + m.content.lstrip('\n') + '<|im_end|>' }}{%- endfor %}"
    ),
    "macros and json": (
        "{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- elif content is iterable and content "
        "is not mapping -%}{%- for c in content -%}{{ c.text }}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
        "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{{ text(m.content) | trim }}"
        "{{ text(m.content).endswith('x') }}{% for k, v in m.items() %}{{ k }}={{ v|string|length }}{% endfor %}"
        "{% endfor %}{{ tools is none }}{{ dict(a=1).items()|list }}{{ [3, 1]|sort|join(',') }}"
    ),
    "dates and checks": (
        "{% set today = strftime_now('%d %b %Y') %}{{ today }}{%- if messages[0].role == 'system' -%}"
        "{% set system = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}"
        "{% set rest = messages %}{% endif %}{{ system }}"
        "{% set users = rest|selectattr('role', 'equalto', 'user')|list %}{{ users|length }}"
        "{% set kept = [] %}{% for m in rest %}{% if m['role'] not in ['tool', 'x'] and not m.get('tool_calls') %}"
        "{% set kept = kept + [m] %}{{ kept|length }}{% endif %}{% endfor %}"
        "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m == users[-1] %}[LAST]{% endif %}"
        "{% generation %}{{ m.content|replace('a', 'b')|upper }}{% endgeneration %}{% endfor %}"
    ),
    "odds and ends": (
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ loop.cycle('a', 'b') }}"
        "{{ '%s-%d' % (m.role, 5) }}{{ '%s'|format(m.content) }}{{ m.content|indent(2) }}{{ m.content|title }}"
        "{{ m.content|default('x', true) }}{{ m.content.splitlines()|first }}{{ 'x' * 3 }}{{ 7 // 2 }}{{ 2 ** 8 }}"
        "{{ m.name if m.name is defined else 'anon' }}{% set block %}[{{ m.role }}]{% endset %}{{ block * 2 }}{% endfor %}"
    ),
}


def chat(length: int, text: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": f"{text} {i}"} for i in range(length - 1)]
    return [{"role": "system", "content": "be kind"}, *turns]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_write_what_transformers_writes(family):
    template = ChatTemplate(FAMILIES[family], TOKENS)
    texts = ("hello", "<think>a\nb</think>\n\nanswer", "日本語 😀\nline\n")
    for messages in (HI, *(chat(length, text) for length in (2, 5) for text in texts)):
        expected, _ = render_jinja_template(
            [messages], chat_template=FAMILIES[family], add_generation_prompt=True, **TOKENS
        )
        assert [template.render(messages, add_generation_prompt=True)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_chats_are_within_the_budget(family):
    template = ChatTemplate(FAMILIES[family], TOKENS)
    for messages in (chat(4096, "x"), chat(1000, "word " * 100), chat(4, "long " * 200_000)):
        assert len(template.render(messages, add_generation_prompt=True)) > 50


GROWING = {
    "loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loop that writes": "{% for i in range(100000) %}{{ messages[0].content }}{{ 'x' * 1000 }}{% endfor %}",
    "filtered loop": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "text in a loop": "{% for i in range(100000) %}" + "some text of the template " * 1000 + "{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "call block": "{% macro f(n) %}{{ caller() }}{% if n %}{% call f(n - 1) %}{% call f(n - 1) %}{% endcall %}"
    "{% endcall %}{% endif %}{% endmacro %}{% call f(60) %}x{% endcall %}",
    "product": "{{ 'a' * 1000000000 }}",
    "product of lists": "{{ ([1] * 1000000000)|length }}",
    "doubling by ~": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by set": "{% set n = namespace(s='x') %}{% for i in range(60) %}"
    "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "doubling by join": "{% set n = namespace(s='x') %}{% for i in range(60) %}"
    "{% set n.s = [n.s, n.s]|join(n.s) %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set n.s = n.s.replace('x', n.s) %}{% endfor %}",
    "doubling by format": "{% set n = namespace(s='x') %}{% for i in range(60) %}"
    "{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
    "nested lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s }}",
    "nested lists by +": "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set n.s = [n.s] + [n.s] %}"
    "{% set n.t = [n.t] + [n.t] %}{% endfor %}{{ n.s == n.t }}",
    "slices": "{% set s = 'x' * 1000000 %}{% for i in range(100000) %}{% set t = s[1:] %}{% endfor %}",
    "comparisons": "{% set s = 'x' * 1000000 %}{% set t = s + 'y' %}{% for i in range(100000) %}"
    "{% if 'y' in s or s < t %}{% endif %}{% endfor %}",
    "methods": "{% set s = 'x' * 1000000 %}{% for i in range(100000) %}{% if s.upper().strip('x') %}{% endif %}{% endfor %}",
    "filters": "{% for i in range(100000) %}{% if range(100000)|map('string')|list %}{% endif %}{% endfor %}",
    "tests": "{% set s = 'x' * 1000000 %}{% for i in range(100000) %}{% if s is upper or s is eq(s) %}{% endif %}{% endfor %}",
    "sums": "{% for i in range(100000) %}{% if range(100000)|sum %}{% endif %}{% endfor %}",
    "splits": "{% set s = 'x ' * 3000000 %}{% if s.split(' ') %}{% endif %}",
    "keys": "{% set t = (messages, range(100000)|list) %}{% for i in range(100000) %}{% if {}.get((i, 'x' * 10000)) %}"
    "{% endif %}{% endfor %}",
    "center": "{{ 'a'|center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "indent": "{{ 'a\nb'|indent(1000000000) }}",
    "indent by name": "{{ 'a\nb'|indent(first=true, width=1000000000) }}",
    "indent by a text": "{{ ('\n' * 100000)|indent('x' * 100000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "batch by name": "{{ [1]|batch(fill_with=0, linecount=1000000000)|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "changes": "{% for i in range(100000) %}{% if loop.changed(range(100000)|list) %}{% endif %}{% endfor %}",
}
REFUSED = {
    "power": "{{ 10 ** 1000000000 }}",
    "numbers": "{% set n = namespace(i=2) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}{{ n.i }}",
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "width": "{{ '%1000000000d' % 5 }}",
    "precision": "{{ '%.1000000000f'|format(5) }}",
    "width as a value": "{{ '%*d' % (1000000000, 5) }}",
    "format": "{{ '{:>1000000000}'.format(5) }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 5}) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "lorem ipsum": "{{ lipsum(n=1000000000) }}",
    "json": "{{ messages|tojson(indent=1000000000) }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "rounding": "{{ 1.5|round(1000000000, 'ceil') }}",
    "lists as sums": "{{ [[1]]|sum(start=[]) }}",
    "mutation": "{{ messages.append(1) }}",
    "internals": "{{ ''.__class__.__mro__ }}",
    "internals by filter": "{{ (''|attr('__class__')).mro() }}",
    "internals of functions": "{{ range.__globals__.x }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'x' as x %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "autoescape": "{% autoescape true %}x{% endautoescape %}",
    "unknown filter": "{{ 'x'|wordwrap }}",
    "syntax": "{% if",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "terms": "{{ " + "+".join("1" * 50_000) + " }}",
    "length": "x" * 300_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GROWING, *REFUSED])
def test_no_template_takes_time_or_memory_without_end(name):
    source = GROWING.get(name) or REFUSED[name]
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(JaxspecError) as caught:
        ChatTemplate(source, TOKENS).render(HI, add_generation_prompt=True)
    assert time.process_time() - start < 10  # about 1 second
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 150 * 1024
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    if name in GROWING:
        assert isinstance(caught.value, ModelFormatError)  # at the start, not with the first request
        assert "needs too much time or memory" in message
        assert "chat_template.jinja" in message


def test_what_only_grows_with_some_chats_fails_those_requests():
    source = "{% if messages|length > 1 %}" + GROWING["loop"] + "{% endif %}ok"
    template = ChatTemplate(source, TOKENS)
    assert template.render(HI, add_generation_prompt=True) == "ok"
    with pytest.raises(InvalidRequestError, match="needs too much time or memory") as caught:
        template.render(HI + HI, add_generation_prompt=True)
    assert caught.value.param == "messages"
    assert template.render(HI, add_generation_prompt=True) == "ok"


def test_a_filter_cannot_swallow_the_end_of_the_budget():
    source = "{% for i in range(1000) %}{% if messages|length > 1 and ('x' * 100000000) is sequence %}{% endif %}{% endfor %}"
    template = ChatTemplate(source, TOKENS)
    with pytest.raises(InvalidRequestError, match="needs too much"):
        template.render(HI + HI, add_generation_prompt=True)


def test_a_budget_that_was_exceeded_stays_so():
    budget = Budget(num_messages=1, num_bytes=0)
    for units in (2**40, 0):
        with pytest.raises(TemplateTooExpensiveError):
            budget.spend(units)


def test_what_is_written_is_bounded_by_what_was_asked():
    template = ChatTemplate(
        "{% for i in range(5) %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}", TOKENS
    )
    assert len(template.render(HI, add_generation_prompt=True)) == 10
    with pytest.raises(InvalidRequestError, match="needs too much"):
        template.render([{"role": "user", "content": "x" * 2_000_000}], add_generation_prompt=True)


def test_a_rejection_is_in_the_templates_words_and_short():
    template = ChatTemplate("{{ raise_exception('no\n' + messages[0].content) }}", TOKENS)
    with pytest.raises(InvalidRequestError) as caught:
        template.render([{"role": "user", "content": "way " * 10_000}], add_generation_prompt=True)
    assert str(caught.value).startswith("the chat template rejects these messages: no way way")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("source", "line"), [("a\n{% include 'x' %}", "line 2: include"), ("a\nb\n{{ x", "line 3")])
def test_errors_of_a_template_name_the_line(source, line):
    with pytest.raises(ModelFormatError, match=line):
        ChatTemplate(source, TOKENS)


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% for name, value in tool.function.parameters.items() %}"
    "{{ name }}={{ value }}{% endfor %}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ reasoning_effort | default('medium') }}{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}"
)


def test_tools_calls_and_variables_are_written_as_transformers_writes_them():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "é"]}}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    variables = {"tools": [TOOL], "reasoning_effort": "high", "enable_thinking": False}
    template = ChatTemplate(WITH_TOOLS, TOKENS)
    expected, _ = render_jinja_template(
        [messages], chat_template=WITH_TOOLS, add_generation_prompt=True, **variables, **TOKENS
    )
    assert [template.render(messages, add_generation_prompt=True, variables=variables)] == expected
    assert template.render(HI, add_generation_prompt=True) == "user:himedium"


def test_many_tools_are_within_the_budget():
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(512)]
    template = ChatTemplate(WITH_TOOLS, TOKENS)
    assert len(template.render(HI, add_generation_prompt=True, variables={"tools": tools})) > 10**6
