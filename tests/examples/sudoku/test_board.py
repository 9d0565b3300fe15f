"""A board reads, renders and solves what TextArena shows."""

import random
import string

import pytest
import textarena.envs.Sudoku.env as textarena_sudoku
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.sudoku.board import Board, Cell, Move, parse_board, random_puzzle, solve

RENDERED = """\
   C1 C2 C3   C4 C5 C6   C7 C8 C9  
R1  4  8  9 |  5  6  7 |  1  2  3
R2  5  2  7 |  8  1  3 |  6  9  4
R3  6  1  3 |  4  2  . |  5  7  8
   - - - - - - - - - - - - - - - - 
R4  2  6  1 |  7  3  . |  8  5  9
R5  .  7  5 |  1  9  8 |  4  .  2
R6  8  9  4 |  6  5  2 |  3  1  .
   - - - - - - - - - - - - - - - - 
R7  9  4  6 |  3  .  5 |  2  8  1
R8  7  5  8 |  2  4  1 |  9  3  6
R9  1  3  2 |  9  8  6 |  7  4  5"""  # noqa: W291 - the environment's own spaces

HARD = (
    "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79",
    ".2.4.37.........32........4.4.2...7.8...5.........1...5.....9...3.9....7..1..86..",
)

boards = st.builds(
    lambda seed, empty: random_puzzle(random.Random(seed), empty=empty)[0], st.integers(0), st.integers(0, 81)
)


def board_of(digits: str) -> Board:
    values = [0 if digit == "." else int(digit) for digit in digits]
    return Board.from_rows([values[i : i + 9] for i in range(0, 81, 9)])


def test_a_recorded_board_is_read_and_rendered_as_it_was() -> None:
    board = parse_board(RENDERED)
    assert board is not None
    assert board.rows[4] == (0, 7, 5, 1, 9, 8, 4, 0, 2)
    assert board.render() == str(board) == RENDERED
    assert board.filled == 75
    assert board.empty_cells == (Cell(3, 6), Cell(4, 6), Cell(5, 1), Cell(5, 8), Cell(6, 9), Cell(7, 5))


@given(boards)
@settings(deadline=None)
def test_boards_are_rendered_exactly_as_textarena_renders_them(board: Board) -> None:
    game = textarena_sudoku.SudokuEnv()
    assert board.render() == game._get_grid_string_with_indices([list(row) for row in board.rows])


@given(boards, st.text(string.printable), st.text(string.printable))
@settings(deadline=None)
def test_a_board_survives_rendering_and_reading_among_other_text(board: Board, before: str, after: str) -> None:
    assert parse_board(f"{before}\n{board}\n{after}") == board


def test_the_last_complete_board_of_a_history_counts() -> None:
    """A text that repeats the whole game holds many boards; a torn one at its end is not a board."""
    old, _ = random_puzzle(random.Random(1), empty=20)
    new = old.place(Move(*old.empty_cells[0], 1))
    torn = RENDERED[: RENDERED.index("R9")]
    assert parse_board(f"[GAME] Game Board:\n{old}\n[Player 0] [1 2 3]\nBoard state: \n{new}\n\n{torn}") == new


@pytest.mark.parametrize(
    "text", ["", "no board", RENDERED[: RENDERED.index("R9")], RENDERED.replace("R5", "R6"), f"{RENDERED}  7"]
)
def test_a_text_without_a_complete_board_has_none(text: str) -> None:
    assert parse_board(text) is None


@pytest.mark.parametrize("change", [("\n", "\r\n"), ("\n", "\n\n"), ("  \n", "\n"), ("\n", "\n    ")])
def test_white_space_around_rows_does_not_matter(change: tuple[str, str]) -> None:
    assert parse_board(RENDERED.replace(*change)) == parse_board(RENDERED)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0] * 9] * 8, "9 rows of 9"),
        ([[0] * 9] * 8 + [[0] * 8], "9 rows of 9"),
        ([[0] * 9] * 8 + [[0] * 8 + [10]], "row 9, column 9 .* not 10"),
        ([[-1] + [0] * 8] + [[0] * 9] * 8, "row 1, column 1 .* not -1"),
        ([["5"] + [0] * 8] + [[0] * 9] * 8, "row 1, column 1 .* not '5'"),
        ([[True] + [0] * 8] + [[0] * 9] * 8, "row 1, column 1 .* not True"),
        ([[None] + [0] * 8] + [[0] * 9] * 8, "row 1, column 1 .* not None"),
    ],
)
def test_rows_that_are_no_board_are_refused_by_place_and_value(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Board.from_rows(rows)


def test_rows_of_json_make_a_board_that_equals_the_text() -> None:
    board = parse_board(RENDERED)
    assert board is not None
    assert Board.from_rows([list(row) for row in board.rows]) == board


def test_candidates_are_what_row_column_and_box_allow() -> None:
    board = board_of(HARD[0])
    assert board.candidates(Cell(1, 3)) == (1, 2, 4)
    assert board.candidates(Cell(5, 5)) == (5,)
    assert board.candidates(Cell(1, 1)) == ()


@given(st.integers(0), st.integers(0, 81))
@settings(deadline=None)
def test_candidates_always_include_the_solution(seed: int, empty: int) -> None:
    puzzle, solution = random_puzzle(random.Random(seed), empty=empty)
    assert all(solution.number(cell) in puzzle.candidates(cell) for cell in puzzle.empty_cells)


@pytest.mark.parametrize("cell", [Cell(0, 1), Cell(1, 0), Cell(10, 1), Cell(1, 10), Cell(-1, 5)])
def test_a_cell_off_the_board_is_refused(cell: Cell) -> None:
    board = board_of(HARD[0])
    with pytest.raises(ValueError, match=r"1\.\.9"):
        board.number(cell)
    with pytest.raises(ValueError, match=r"1\.\.9"):
        board.candidates(cell)


def test_placing_gives_a_new_board_and_leaves_the_old_one() -> None:
    board = board_of(HARD[0])
    after = board.place(Move(5, 5, 5))
    assert (board.number(Cell(5, 5)), after.number(Cell(5, 5))) == (0, 5)
    assert after.filled == board.filled + 1
    assert sum(a != b for a, b in zip(sum(after.rows, ()), sum(board.rows, ()), strict=True)) == 1


@pytest.mark.parametrize("move", [Move(1, 1, 4), Move(1, 3, 0), Move(1, 3, 10), Move(10, 3, 1)])
def test_a_move_onto_a_filled_cell_or_out_of_range_is_not_placed(move: Move) -> None:
    with pytest.raises(ValueError):
        board_of(HARD[0]).place(move)


def test_a_move_is_written_in_the_form_that_the_environment_reads() -> None:
    assert str(Move(5, 3, 7)) == "[5 3 7]"
    assert Move(5, 3, 7).in_range
    assert not Move(5, 3, 10).in_range


@pytest.mark.parametrize("digits", HARD)
def test_the_solver_solves_hard_puzzles_without_changing_clues(digits: str) -> None:
    board = board_of(digits)
    solution = solve(board)
    assert solution is not None
    assert solution.is_solved
    clues = [(a, b) for a, b in zip(sum(board.rows, ()), sum(solution.rows, ()), strict=True) if a]
    assert all(a == b for a, b in clues)


def test_a_board_that_breaks_the_rules_has_no_solution() -> None:
    assert solve(board_of("55" + HARD[0][2:])) is None


def test_a_full_board_is_solved_only_if_it_is_consistent() -> None:
    _, solution = random_puzzle(random.Random(0), empty=0)
    assert solution.is_solved
    rows = [list(row) for row in solution.rows]
    rows[0], rows[3] = rows[3], rows[0]  # rows and columns stay right, boxes do not
    assert not Board.from_rows(rows).is_solved
    assert not Board.from_rows([[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 9).is_solved
    assert not Board.from_rows([[0] * 9] * 9).is_solved


def test_a_fingerprint_tells_boards_apart_and_never_changes() -> None:
    board = board_of(HARD[0])
    assert board.fingerprint == board_of(HARD[0]).fingerprint == "19b928a88dca"
    assert board.fingerprint != board.place(Move(5, 5, 5)).fingerprint


@given(st.integers(0), st.integers(0, 81))
@settings(deadline=None)
def test_a_random_puzzle_is_cut_from_its_solution(seed: int, empty: int) -> None:
    puzzle, solution = random_puzzle(random.Random(seed), empty=empty)
    assert solution.is_solved
    assert len(puzzle.empty_cells) == empty
    assert all(puzzle.number(cell) in {0, solution.number(cell)} for cell in map(Cell._make, _all_cells()))
    assert (puzzle, solution) == random_puzzle(random.Random(seed), empty=empty)


def _all_cells() -> list[tuple[int, int]]:
    return [(row, col) for row in range(1, 10) for col in range(1, 10)]
