"""Readers of evidence: one module a source, all of them text or records in, frozen records out, nothing executed.

``gather.read_paths`` is the way in: it walks files, folders and archives, finds out by content what each part is, lets every
reader look at every part, and returns a ``CaseFile`` in which each fact cites the line or byte range it came from.

Not here yet: NCCL debug logs beyond ``NCCL WARN``, Nsight reports, Python core dumps.
"""
