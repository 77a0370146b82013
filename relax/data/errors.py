"""The one error of the dataset part: something in the prompt data that the user has to change."""


class DataError(ValueError):
    """`problem` says what was wrong, the value seen and where it stands; `fix` is a sentence on what to change."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}. {fix}")
        self.problem = problem
        self.fix = fix

    def at(self, where: str) -> "DataError":
        """The same error with the place (file and line) in front."""
        return DataError(f"{where}: {self.problem}", self.fix)
