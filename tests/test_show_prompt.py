"""--show_prompt shows what is sent, with the system turn that a chat template puts in by itself."""

import importlib
import re

import pytest
from conftest import toy_args
from test_faults import TOKENIZER, WEIGHTS, copy_of_the_toy

from engine.data import SUFFIX, SYSTEM, load_problems

# Qwen2.5's template, in short: where no system turn is given it inserts one of its own
INSERTED = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN = f"""\
{{%- if messages[0].role != 'system' %}}{{{{ '<|im_start|>system\\n{INSERTED}<|im_end|>\\n' }}}}{{% endif %}}
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' + m.content }}}}<|im_end|>
{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
SYSTEM_TURN = "<|im_start|>system\n{}<|im_end|>\n"
USER_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def shown(script: str, capsys, **flags) -> dict[str, str]:
    """{title: text} of what --show_prompt prints; the script exits with code 0."""
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as exit:
        module.main(toy_args(module, show_prompt=True, **flags))
    assert not exit.value.code
    printed = capsys.readouterr().out.split("--- ")[1:]
    found = {}
    for part in printed:
        title, _, text = part.partition("\n")
        found[re.sub(r": \d+ tokens$", "", title)] = text.removesuffix("\n")
    return found


def test_the_prompt_is_shown_as_it_is_sent(tmp_path, capsys):
    """The toy's; and those of a folder without weights, whose template inserts a system turn."""
    question = load_problems("toy")[0].question
    assert shown("ttrl", capsys) == {"first problem of --dataset": USER_TURN.format(question)}
    own = {"z_0 (--question_prompt)": USER_TURN.format("Write a problem.")}
    assert shown("dynamic_rl", capsys) == own

    model = copy_of_the_toy(tmp_path / "model", TOKENIZER, dict(chat_template=QWEN))
    (model / WEIGHTS).unlink()
    room = dict(model=str(model), max_prompt_tokens=256, out=str(tmp_path / "run"))
    z_0 = SYSTEM_TURN.format(INSERTED) + USER_TURN.format("Write a problem.")
    first = {"system": SYSTEM_TURN.format(SYSTEM) + USER_TURN.format(question),
             "suffix": SYSTEM_TURN.format(INSERTED) + USER_TURN.format(question + SUFFIX)}
    for prompt in ("system", "suffix"):
        own = {"z_0 (--question_prompt)": z_0}
        expected = {"first problem of toy": first[prompt]} | own
        assert shown("dynamic_rl", capsys, prompt=prompt, eval="toy", **room) == expected
        assert shown("ttrl", capsys, prompt=prompt, **room) == {"first problem of --dataset": first[prompt]}
    own = {"z_0 (--question_prompt)": "Write a problem.\n\n"}
    assert shown("dynamic_rl", capsys, prompt="plain", **room) == own
    assert not (tmp_path / "run").exists()
