"""Chat templates in processes of their own: the same texts as by transformers, and limits."""

import gc
import os
import time

import pytest
from transformers.utils import chat_template_utils

from gearbx_mlx import GearbxWarning
from gearbx_mlx.compat.templates import COMPILER, ConfinedTemplate, TemplateError, confine, confined
from gearbx_mlx.loading import load

MESSAGES = [
    {"role": "user", "content": 'é "<b>"\n'},
    {"role": "assistant", "content": "\ud800", "tool_calls": [{"a": 1}]},
]
TEMPLATES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ dict(a=1) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% generation %}{{ messages[0].content | trim }}{% endgeneration %}",
    "{%- if add_generation_prompt is defined and not tools %}\n  on\n{% endif %}",
)
LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_matches_transformers(template):
    values = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True}
    expected = chat_template_utils._cached_compile_jinja_template(template).render(**values)
    assert ConfinedTemplate(template).render(**values) == expected


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no such role') }}", "{{ messages.__class__.mro() }}", "{% if %}"]
)
def test_an_error_has_the_words_of_transformers(template):
    with pytest.raises(Exception) as expected:  # noqa: PT011
        chat_template_utils._cached_compile_jinja_template(template).render(messages=[])
    with pytest.raises(TemplateError) as error:
        ConfinedTemplate(template).render(messages=[])
    assert str(error.value) == str(expected.value)


def test_process_serves_one_template():
    template = ConfinedTemplate("{{ n }}")
    assert [template.render(n=n) for n in (1, "b")] == ["1", "b"]
    process = template.renderer.process
    assert template.render(n=2) == "2"
    assert template.renderer.process is process
    del template
    gc.collect()
    assert process.returncode is not None


def test_endless_template_leaves_next_one_rendered():
    template = ConfinedTemplate("{% if n %}" + LONG + "{% endif %}whole")
    assert template.render(n=0) == "whole"
    began, used = time.monotonic(), os.times().children_user
    with pytest.raises(TemplateError, match="it takes more than"):
        template.render(n=1)
    assert min(time.monotonic() - began, os.times().children_user - used) < 3
    assert template.render(n=0) == "whole"


def test_chat_is_rendered_in_process(demo):
    confine()
    assert getattr(chat_template_utils, COMPILER) is confined
    tokenizer = load()[1]
    before = confined.cache_info().currsize
    template = "{{ messages[0].content }}" + " " * 7
    text = tokenizer.apply_chat_template(MESSAGES[:1], chat_template=template, tokenize=False)
    assert text == MESSAGES[0]["content"] + " " * 7
    assert confined(template).renderer is not None
    assert confined.cache_info().currsize >= min(before + 1, 4)


def test_other_transformers_version_warns_of_missing_limit(monkeypatch):
    monkeypatch.delattr(chat_template_utils, COMPILER)
    with pytest.warns(GearbxWarning, match="transformers"):
        confine.__wrapped__()
