"""Records that `doll join` writes: features with their label, and what is known about the label."""

from __future__ import annotations

from typing import Any

import msgspec


class JoinedRecord(msgspec.Struct, kw_only=True):
    """The fields that a joiner adds to the features and labels. Subclass it for `FieldsTask.record`.

    A record without them counts as the first record of its pair, with a label of age 0.

    Attributes:
        doll_label_age_s: seconds from the features to the label, or to the decision if there is no label.
        doll_is_correction: whether the record corrects, retracts or confirms an earlier record of the same pair.
        doll_replaced_label: the label of the record that this one corrects; None in a first record.
    """

    doll_label_age_s: float = 0.0
    doll_is_correction: bool = False
    doll_replaced_label: Any = None
