"""What a chat reads and answers, turn by turn, and after Ctrl-C."""

import contextlib
import os
import signal
import sys

import pytest
from chats import ASKED, MODES, MORE, as_without_a_cache, chat, in_gears, tokens_of, with_roles
from conftest import save_model, tiny_model

from gearbx_mlx.chat.run import obey
from gearbx_mlx.cli.signals import CtrlC, Interrupted, caught
from gearbx_mlx.decoding.caches import length


@pytest.fixture(scope="module")
def whole(demo, geared_demo):
    return in_gears(demo, geared_demo)


class PressedAfter:
    """Standard output that presses Ctrl-C after some writes, once or several times."""

    def __init__(self, writes: int, times: int = 1):
        self.left, self.times, self.text = writes, times, ""

    def write(self, text: str) -> int:
        self.text += text
        self.left -= 1
        if self.left == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


@pytest.fixture
def pressed(monkeypatch):
    """Press Ctrl-C after so many tokens."""

    def press(tokens: int, times: int = 1) -> PressedAfter:
        out = PressedAfter(tokens, times)
        monkeypatch.setattr(sys, "stdout", out)
        return out

    return press


def answers_of(session, *messages: str) -> list[str]:
    for message in messages:
        session.answer(message)
    return [said["content"] for said in session.conversation.turns[1::2]][-len(messages) :]


class TestTurns:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
    def test_the_next_answer_is_that_of_a_chat_without_a_cache(self, whole, capsys, flags):
        with chat(**flags) as session:
            session.answer(ASKED)
            before = list(session.cache.tokens)
            session.answer(MORE)
        read = int(capsys.readouterr().err.splitlines()[-1].split(" read")[0])
        *asked, answered = session.conversation.turns
        prompt = tokens_of(whole, asked)
        assert before == prompt[: len(before)]
        assert read == len(prompt) - len(before)
        answered_in_low = len(before) < len(tokens_of(whole, asked[:1]))  # and not kept
        assert answered_in_low == (flags.get("mode") == "kickdown")
        assert answered["content"] == as_without_a_cache(whole, asked, 24)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("tokens", [1, 7])
    @pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
    def test_so_it_is_after_ctrl_c_in_the_middle_of_an_answer(self, whole, pressed, capsys, flags, tokens):
        with caught() as ctrl_c, chat(ctrl_c, **flags) as session:
            out = pressed(tokens)
            session.answer(ASKED)
            stopped = session.conversation.turns[-1]["content"]
            assert stopped == out.text.strip()
            assert stopped == as_without_a_cache(whole, session.conversation.turns[:1], 24)[: len(stopped)]
            session.answer(MORE)
        *asked, answered = session.conversation.turns
        assert answered["content"] == as_without_a_cache(whole, asked, 24)
        first, second = capsys.readouterr().err.splitlines()
        assert f"{tokens} written (stopped)" in first
        assert "24 written (cut)" in second

    def test_a_second_ctrl_c_does_not_wait_and_the_chat_goes_on(self, whole, pressed):
        with caught() as ctrl_c, chat(ctrl_c, gears="16") as session:
            pressed(5, times=2)
            session.answer(ASKED)
            session.answer(MORE)
        *asked, answered = session.conversation.turns
        assert asked[1]["content"]
        assert answered["content"] == as_without_a_cache(whole, asked, 24)

    def test_ctrl_c_stops_a_prompt_between_two_parts_and_what_was_read_is_kept(self, whole, capsys):
        class AtTheThirdLook(CtrlC):
            looks = 0

            @property
            def asked(self):
                self.looks += 1
                return self.looks == 3

            @asked.setter
            def asked(self, value):
                pass

        ctrl_c = AtTheThirdLook()
        with chat(ctrl_c, gears="16", prefill_step_size=8) as session:
            session.answer(ASKED)
            assert (session.conversation.turns, capsys.readouterr().out) == ([], "")
            session.answer(ASKED)
        read = int(capsys.readouterr().err.splitlines()[-1].split(" read")[0])
        asked, answered = session.conversation.turns
        assert read < len(whole.tokenizer.encode(ASKED))
        assert answered["content"] == as_without_a_cache(whole, [asked], 24)

    @pytest.mark.slow
    def test_another_system_prompt_reads_everything_again(self, tmp_path, capsys):
        model = tmp_path / "model"
        with_roles(model)
        with chat(model=str(model), gears="16", system_prompt="Be brief.") as session:
            for line in (ASKED, "/system Be long.", MORE):
                obey(session, line) or session.answer(line)
            written = session.model.tokenizer.decode(session.cache.tokens)
        assert "system: Be long." in written
        assert "brief" not in written
        read = int(capsys.readouterr().err.splitlines()[-1].split(" read")[0])
        begins = session.model.tokenizer.encode("system: Be", add_special_tokens=False)
        assert read + 24 + len(begins) == len(session.cache.tokens)

    def test_thoughts_that_the_template_takes_out_of_earlier_turns_are_read_no_more(self, tmp_path, capsys):
        model = tmp_path / "model"
        with_roles(model, "{{ message.content.split('apples')[-1] }}")
        with chat(model=str(model), gears="16") as session:
            session.answer(ASKED)
            session.conversation.turns[-1]["content"] = "I think of apples and say: seven"
            session.answer(MORE)
            written = session.model.tokenizer.decode(session.cache.tokens)
        assert "assistant: and say: seven\n" in written
        assert "think" not in written

    def test_without_a_template_every_turn_is_a_line(self):
        with chat(gears="16", ignore_chat_template=True) as session:
            for line in ("One and", "two"):
                session.answer(line)
            written = session.model.tokenizer.decode(session.cache.tokens, skip_special_tokens=True)
        answers = [said["content"] for said in session.conversation.turns[1::2]]
        assert written.startswith(f"One and\n{answers[0]}\ntwo")

    @pytest.mark.parametrize("architecture", ["mamba", "lfm2", "gemma3_text"])
    def test_models_with_states_and_windows_chat(self, tmp_path, capsys, architecture):
        save_model(tiny_model(architecture, vocab_size=4096), tmp_path / "model")
        for flags in ({"gears": "16"}, {"gears": "4,16", "mode": "lossless"}):
            with chat(model=str(tmp_path / "model"), max_tokens=6, **flags) as session:
                answers = answers_of(session, "one", "two", "three")
                again = session.conversation.turns[:4]
                session.reset()
                session.conversation.turns += again
                assert answers_of(session, "three") == answers[2:]

    @pytest.mark.slow
    def test_ctrl_c_just_as_an_answer_ends_loses_nothing(self, whole, pressed):
        with caught() as ctrl_c, chat(ctrl_c, gears="16") as session:
            out = pressed(25)  # 24 tokens, and the line's end
            with contextlib.suppress(Interrupted):
                session.answer(ASKED)
            assert [said["content"] for said in session.conversation.turns] == [ASKED, out.text.strip()]
            session.answer(MORE)
        *asked, answered = session.conversation.turns
        assert answered["content"] == as_without_a_cache(whole, asked, 24)

    def test_a_second_ctrl_c_while_the_cache_is_looked_at_forgets_it(self, tmp_path, monkeypatch, capsys):
        def interrupted(*_):
            raise Interrupted

        save_model(tiny_model("lfm2", vocab_size=4096), tmp_path / "model")
        with chat(model=str(tmp_path / "model"), gears="16", max_tokens=6) as session:
            with monkeypatch.context() as patch:
                patch.setattr(session.cache, "note", interrupted)
                session.answer("one")
            assert "(stopped)" in capsys.readouterr().err
            assert (length(session.cache.entries), session.cache.tokens) == (0, [])
