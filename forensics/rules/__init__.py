"""The rules of the classifier, one module a family of classes. ``base`` holds what a rule is, ``table`` how they merge."""
