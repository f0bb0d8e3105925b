"""Completion of commands, options and recipes.

eval "$(eagle31 completion bash)"          in ~/.bashrc; zsh likewise
"""

from eagle31_train import cli
from eagle31_train.__main__ import COMMANDS
from eagle31_train.console import note, parser, tidy

SCRIPT = """{zsh}_eagle31() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word"))
  else compopt -o nospace 2>/dev/null; COMPREPLY=($(compgen -W "{options}" -- "$word")); fi
}}
COMP_WORDBREAKS="${{COMP_WORDBREAKS//=/}}"
complete -o default -F _eagle31 eagle31"""


def main(argv: list[str] | None = None) -> None:
    options = parser("completion", __doc__)
    options.add_argument("shell", choices=("bash", "zsh"))
    zsh = "autoload -U bashcompinit && bashcompinit\n" if options.parse_args(argv).shell == "zsh" else ""
    words = [f"{name}=" for name in cli.option_names()]
    words += [f"+experiment={name}" for name in cli.choices("experiment")]
    with tidy():
        note(SCRIPT.format(zsh=zsh, commands=" ".join(COMMANDS), options=" ".join(words)))


if __name__ == "__main__":
    main()
