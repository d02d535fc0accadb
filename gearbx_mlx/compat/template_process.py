"""The process of one chat template: it renders requests of `templates.py`, within limits of time and memory.

Its argument is the module search path. It reads lines of JSON from its standard input: values for the template; the
first line also has the template. Each gets a line: the `text`, or the kind and the words of an `error`. Python cannot
interrupt C code, such as a huge power, so the system ends the whole process.
"""

import contextlib
import importlib.util
import json
import resource
import signal
import sys
import types

SECONDS = 1.5  # CPU time per rendered text
MAX_MEMORY = 2**30  # bytes, including the interpreter's own
MAX_TEXT = 2**26  # characters of a rendered text
PACKAGES = {"transformers": "", "transformers.utils": "/utils"}


def load_compiler():
    """Return transformers' function that compiles chat templates.

    The packages around its module are not run, to save a second.
    """
    with contextlib.suppress(Exception):
        found = importlib.util.find_spec("transformers")
        places = found.submodule_search_locations if found is not None else None
        for name, folder in PACKAGES.items():
            package = types.ModuleType(name)
            package.__path__ = [place + folder for place in places or ()]
            sys.modules[name] = package
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template


def render(compiler, template: str, values: dict) -> dict[str, str]:
    """Render a template with values, and return its text or its error."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
    try:
        text = compiler(template).render(**values)
        if len(text) > MAX_TEXT:
            raise ValueError(f"it makes {len(text)} characters, more than {MAX_TEXT}")
        return {"text": text}
    except MemoryError:
        return {"error": "MemoryError", "words": f"it takes more than {MAX_MEMORY >> 30} GB"}
    except Exception as error:
        return {"error": type(error).__name__, "words": str(error)[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    compiler = load_compiler()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a system without this limit, or with a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    template = ""
    for line in sys.stdin:
        asked = json.loads(line)
        template = asked.get("template", template)
        sys.stdout.write(json.dumps(render(compiler, template, asked["values"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
