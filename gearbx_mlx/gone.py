"""What is gone, and what to use instead. Who meets an unknown flag, field or file looks here before he calls it so."""

SINCE = "0.1.0"

ROUTER = (
    "server --server URL --server-model A,B chooses a model by the prompt, and a proxy such as LiteLLM does the rest"
)
GONE: dict[str, str] = {
    "--small-server": ROUTER,
    "--large-server": ROUTER,
    "--small-server-model": ROUTER,
    "--large-server-model": ROUTER,
    "--connect-timeout": "--server-timeout is for the connection too",
    "--no-fallback": ROUTER,
    "--path": "--model_args of lm_eval are the flags of generate; give model",
    "--group-size": "--model_args of lm_eval are the flags of generate; give q_group_size",
    "--use-chat-template": "--model_args of lm_eval are the flags of generate; give ignore_chat_template",
    "--server-api": "Ollama is asked by its API like OpenAI's; leave the flag out",
}
"""From a name to what to use instead: `--flag`, `--flag value`, `command --flag` where other commands still have the
flag, a field of a request, a mode, `schema 'NAME'` of a file."""


def gone(name: str, command: str = "") -> str | None:
    """Return the line that refuses a name; None for one that is not gone."""
    instead = GONE.get(f"{command} {name}") or GONE.get(name)
    return None if instead is None else f"{name} is gone since gearbx-mlx {SINCE}; {instead}"
