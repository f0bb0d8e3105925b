"""Whether a store is complete, and as it was written."""

from typing import Any

from eagle31_train import artifacts
from eagle31_train.place import Place
from eagle31_train.schema import UserError
from eagle31_train.store.ledger import PLAN, TARGET, difference, read_merged, read_target_line, refuse_old
from eagle31_train.store.plan import Plan
from eagle31_train.store.sealed import DamagedError, unseal
from eagle31_train.store.stream import read_consumed


def finished(place: Place, fingerprint: str, inputs: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The manifest of a complete store of these inputs; None if there is work to do.

    Of shards only sizes are compared; `python -m eagle31_train.store verify` reads every byte. A store that is
    damaged is complete no more: its manifest is removed.

    Raises:
        UserError: the place holds a store of an earlier version, or of other inputs and `overwrite` is off.
    """
    refuse_old(place)
    try:
        manifest = unseal(place.read(artifacts.MANIFEST))
    except FileNotFoundError:
        return None
    except DamagedError as error:
        print(f"{place.location}/{artifacts.MANIFEST} is damaged ({error}); finishing the store again")
        place.remove(artifacts.MANIFEST)
        return None
    if manifest["fingerprint"] != fingerprint:
        if not overwrite:
            raise UserError(
                f"{place.location} was made from other inputs "
                f"({artifacts.describe_change(manifest['inputs'], inputs)}): "
                "choose another name=… or run_dir=…, or replace it with overwrite=true"
            )
        return None
    if damage := _first_damaged(place, manifest):
        print(f"{damage}; making it again")
        place.remove(artifacts.MANIFEST)
        return None
    return manifest


def _first_damaged(place: Place, manifest: dict[str, Any]) -> str | None:
    """Name the first file of a complete store that is not as it was written, as far as `finished` looks."""
    for name, entry in manifest["files"].items():
        if damage := difference(place, name, entry):
            return damage
    plan = Plan.from_json(unseal(place.read(PLAN)))
    wanted = {line.name: line.size for line in read_merged(place, plan, manifest["fingerprint"]).values()}
    gone = set(read_consumed(place).shards)
    found = place.sizes("shards")
    target = read_target_line(place, manifest["fingerprint"])
    if place.remote:  # no download only to compare
        wanted[TARGET], size = target.size, place.size(TARGET)
        found |= {TARGET: size} if size is not None else {}
    elif damage := difference(place, TARGET, target.entry):
        return damage
    for name, size in wanted.items():
        if found.get(name) != size and name not in gone:
            what = f"has {found[name]} bytes, not {size}: truncated or replaced" if name in found else "is missing"
            return f"{place.location}/{name} {what}"
    return None
