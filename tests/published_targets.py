"""config.json of published targets, without their weights: what the recipes name on the hub."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "published"
OF_RECIPE = {"llama31_8b": "llama31_8b", "qwen3_8b": "qwen3_8b"}
OF_RECIPE |= dict.fromkeys(("kimi", "kimi_k25", "kimi_llama"), "kimi_k25")  # K2.6 has every size of K2.5


def recipe(experiment):
    """The words that choose a recipe, with its target here."""
    return [f"+experiment={experiment}", f"target.path={FOLDER / OF_RECIPE[experiment]}"]
