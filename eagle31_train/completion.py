"""Print shell completion of commands, options, recipes and suites.

eval "$(eagle31 completion bash)"          in ~/.bashrc; zsh likewise
"""

from eagle31_train import compose
from eagle31_train.__main__ import COMMANDS
from eagle31_train.common.console import note, parser, tidy
from eagle31_train.run import PROFILES, STAGES

SCRIPT = """{zsh}_eagle31() {{
  local word="${{COMP_LINE:0:COMP_POINT}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words; word="${{word##* }}"
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"
  else case "${{COMP_WORDS[1]}} $before" in
{cases}
    *) words="{options}" ;;
  esac; fi
  if [ "$COMP_CWORD" -gt 1 ]; then compopt -o nospace 2>/dev/null; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  COMPREPLY=("${{COMPREPLY[@]#${{word%${{word##*[ $COMP_WORDBREAKS]}}}}}}")  # bash replaces what follows = alone
}}
complete -o default -F _eagle31 eagle31"""
COMMON = "--help --cfg --config-dir"
# Shell pattern of command and previous word → completions. The first match wins; without one, a recipe's options.
WORDS = {
    "run --from|run --until": " ".join(STAGES),
    "run --profile": " ".join(PROFILES),
    "* --config-dir|* --cache-dir|* --out": "",  # a folder
    "store store": "verify info",
    "store *": "--help --remove --cache-dir --cache-bytes",
    "report *": "--help --out",
    "new *": "--help",
    "completion *": "--help bash zsh",
}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, prog="eagle31 completion")
    options.add_argument("shell", choices=("bash", "zsh"))
    zsh = "autoload -U bashcompinit && bashcompinit\n" if options.parse_args(argv).shell == "zsh" else ""
    words = [f"{name}=" for name in compose.OPTIONS]
    words += [f"+{group}={name}" for group in ("experiment", "suite") for name in compose.choices(group)]
    recipe = " ".join([COMMON, *words])
    by_pattern = {**WORDS, "run *": f"--from --until --profile {recipe}"}
    cases = [(pattern.replace(" ", "\\ "), some) for pattern, some in by_pattern.items()]  # escaped for `case`
    lines = "\n".join(f'    {pattern}) words="{some}" ;;' for pattern, some in cases)
    with tidy():
        note(SCRIPT.format(zsh=zsh, commands=" ".join(COMMANDS), cases=lines, options=recipe))


if __name__ == "__main__":
    main()
