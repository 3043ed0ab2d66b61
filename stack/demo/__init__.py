"""`hoofprint demo`: a small policy trained through every part, watched, reported, and checked against the design's laws."""
