"""SASS: decoded machine code, and engines that give it meaning."""
