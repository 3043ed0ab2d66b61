"""The archive of a run and the questions that can be asked of it: SQL, report, invariants, what-if, replay."""
