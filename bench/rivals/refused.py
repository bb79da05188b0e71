"""What an implementation says by a code alone, in words."""


class Refused(Exception):
    pass
