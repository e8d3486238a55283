"""Templates render as transformers renders them, and never without an end."""

import gc
import os
import time

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from examples.digits_model import CHAT_TEMPLATE, make_tokenizer
from model.data import template as limits
from model.data.template import Template, TemplateError

CHAT = [
    {"role": "user", "content": "2 < 3 & 'so'? \U0001f600"},
    {"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": " {{ 1 }}\n"}]},
]
TEMPLATES = [
    CHAT_TEMPLATE,
    "{{ messages | tojson(indent=2) }}{{ tools }}{{ documents }}{{ bos_token }}",
    "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n }}",
    "{% for m in messages %}\n {% if loop.last %}{% break %}{% endif %}\n {{ m }}\n{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{{ dict(a=1) }}{{ 'b' in dict(b=2) }}",
    "{{ messages[0].content | upper | trim }}{{ missing }}{{ strftime_now('%Y') }}",
    "{%- macro say(x) %}<{{ x }}>{% endmacro %}{{ say(1) ~ say('a') }}{{ '%05d' % 7 }}",
]


@pytest.fixture(scope="module")
def variables():
    return PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), bos_token="<s>"
    ).special_tokens_map


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_templates_render_as_in_transformers(variables, source, prompt):
    (expected,), _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=prompt, **variables
    )
    assert Template(source, variables).render(CHAT, [(2, prompt)]) == [expected]


@pytest.fixture
def strict(monkeypatch):
    """Limits that a test reaches soon."""
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    monkeypatch.setattr(limits, "MEGABYTES", 256)
    monkeypatch.setattr(limits, "LETTERS", 10**5)


TIME, MEMORY = "it takes more than 0.3 seconds", "it takes more than 256 MiB of memory"
ENDLESS = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    ("{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(40) }}", TIME),
    ("{{ 'a' * 2000000000 }}", MEMORY),
    ("{{ 'a' | center(2000000000) }}", MEMORY),
    ("{{ '%2000000000d' % 1 }}", MEMORY),
    (
        # A thousand times as long each time: what still fits costs next to no time.
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x * 1000 %}"
        "{% endfor %}",
        MEMORY,
    ),
    (
        "{% for i in range(99999) %}{{ 'abc' }}{% endfor %}",
        "it writes more than 100,000 characters",
    ),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself without an end"),
    ("{{ raise_exception('only users') }}", "only users"),
    ("{{ messages[5].role }}", "list object has no element 5"),
    ("{% for %}", "Expected an expression, got 'end of statement block'"),
    ("{{ range(10**9) | list }}", "Range too big"),
]


@pytest.mark.parametrize(("source", "reason"), ENDLESS)
def test_templates_have_an_end(strict, source, reason):
    found = Template(source, {}).render(CHAT, [(2, False)])
    assert [type(x) for x in found] == [TemplateError]
    assert reason in str(found[0])


def test_a_chat_that_fails_leaves_the_others(strict):
    source = "{{ 'a' * (2000000000 if add_generation_prompt else 3) }}"
    first, second, third = Template(source, {}).render(CHAT, [(2, False), (2, True), (0, False)])
    assert (first, str(second), third) == ("aaa", MEMORY, "aaa")


def test_a_process_that_hangs_is_ended_and_started_anew(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 1000.0)
    monkeypatch.setattr(limits, "PATIENCE", 1.0)
    template = Template("{{ 10 ** (messages | length * 3000000) if messages }}a", {})
    begun = time.monotonic()
    with pytest.raises(TemplateError, match="stops its process: no answer in 1 seconds"):
        template.render(CHAT * 50, [(100, False)])
    assert time.monotonic() - begun < 20
    monkeypatch.setattr(limits, "PATIENCE", 60.0)
    assert template.render([], [(0, False)]) == ["a"]


def test_the_process_ends_with_the_template():
    template = Template("a", {})
    template.render([], [(0, False)])
    pid = template._process.pid
    assert os.path.exists(f"/proc/{pid}")
    del template
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_fork_has_a_process_of_its_own():
    template = Template("a", {})
    assert template.render([], [(0, False)]) == ["a"]
    child = os.fork()
    if child == 0:
        same = template.render([], [(0, False)]) == ["a"]
        template.close()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render([], [(0, False)]) == ["a"]
