"""Chat templates: the same bytes as transformers', and nothing for a template that wants more than text."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.generation.templates import ChatTemplate, read_template
from penstock.support.errors import UsageError

# Written after the forms that families use: markers, a header per message, a system part, tools as JSON, answers.
TEMPLATES = {
    "markers": """{% for message in messages %}
<|{{ message['role'] }}|>
{{ message['content'] }}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "headers": """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}{{- raise_exception('role ' + message.role) }}{%- endif %}
    {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}""",
    "system": """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{% else %}{% set system = 'none' %}{% set rest = messages %}{% endif %}
{% for message in rest %}{% if loop.first %}[{{ system }}] {% endif %}{% if message['role'] == 'user' %}
Q: {{ message['content'] | upper }}{% else %} A: {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}""",
    "json": """{%- set ns = namespace(count=0) %}
{%- for message in messages %}{%- set ns.count = ns.count + 1 %}
{{- loop.index0 ~ ':' ~ (message | tojson(indent=2)) }}
{%- if loop.last %}{% break %}{% endif %}{%- endfor %}
 {{ ns.count }} {{ tools is none }}""",
    "answers": """{% for message in messages %}{% if message['role'] == 'assistant' %}
    {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% else %}{{ '<u>' ~ message['content'] ~ '</u>' }}{% endif %}{% endfor %}""",
}
MESSAGES = [
    {"role": "system", "content": "  Be <brief> & kind.\n"},
    {"role": "user", "content": "¿Qué? 你好 'quoted' \"text\""},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "More"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer", [True, False])
def test_the_same_bytes_as_transformers(name: str, answer: bool, tmp_path: Path):
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from samples.huggingface.folders import write_tokenizer
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(tmp_path, template=TEMPLATES[name])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **SPECIAL)
    theirs.chat_template = TEMPLATES[name]
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=answer)
    template = read_template(tmp_path)
    assert template is not None
    assert template.prompt(MESSAGES, answer=answer).encode() == expected.encode()
    assert "Yes." in expected


def test_templates_are_told_apart():
    """The control: blanks count."""
    texts = {ChatTemplate(text, SPECIAL, "here").prompt(MESSAGES) for text in TEMPLATES.values()}
    assert len(texts) == len(TEMPLATES)
    assert ChatTemplate(TEMPLATES["markers"] + " ", SPECIAL, "here").prompt(MESSAGES) not in texts


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 'x' * 100000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ raise_exception('no') }}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{% for %}",
    ],
)
def test_a_hostile_template_is_refused(text: str):
    with pytest.raises(UsageError, match="chat template"):
        ChatTemplate(text, SPECIAL, "here").prompt(MESSAGES)


def test_where_a_template_lies(tmp_path: Path):
    assert read_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ bos_token }}", "bos_token": "B"}')
    template = read_template(tmp_path)
    assert template is not None
    assert template.prompt([]) == "B"
    (tmp_path / "chat_template.jinja").write_text("J")
    template = read_template(tmp_path)
    assert template is not None
    assert template.prompt([]) == "J"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="not readable as JSON"):
        read_template(tmp_path)
