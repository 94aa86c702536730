"""Half the width of a 95 % interval of a mean over seeds, by Student's t."""

import statistics
from collections.abc import Sequence

# by number of seeds
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def margin(values: Sequence[float]) -> float:
    """Half the width of the interval; NaN for one value."""
    count = len(values)
    if count < 2:
        return float("nan")
    return STUDENT[count] * statistics.stdev(values) / count**0.5
