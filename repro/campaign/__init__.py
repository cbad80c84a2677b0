"""Campaigns: many trials of many cells, judged with stated error rates; proof of a fix, hunts, shrinking, bisection."""
