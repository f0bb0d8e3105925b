"""Workloads with measurements that were made by hand, as `results.summarise` takes them."""

from eagle31_train.evaluation.measurement import Measurement
from eagle31_train.evaluation.workloads import Workload


def measured(name, counts, temperature=0.0, top_p=1.0, notes=(), seconds=()):
    """A workload and its measurements.

    Args:
        name: "SUITE" or "SUITE · PERTURBATION".
        counts: of each drafter by name: a list of Counts, or several of them, one for each training.
        seconds: of 90 tokens without and with the drafter.
    """
    suite, _, perturbation = name.partition(" · ")
    workload = Workload(name, suite, perturbation or None, [], temperature, top_p, notes=list(notes))
    timed = (90, *seconds) if seconds else ()
    trainings = {
        drafter: [Measurement([], rows, *timed) for rows in (some if some and isinstance(some[0], list) else [some])]
        for drafter, some in counts.items()
    }
    return workload, trainings
