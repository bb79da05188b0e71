"""What an implementation, or its process, says that did not do what it was asked for."""


class Refused(Exception):
    pass
