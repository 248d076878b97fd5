from data.agents.trajectory_file import TrajectoryFile
from tests.episodes import made_up_buffer
from tools.pack_exorl import main


def arguments(root, **options):
    words = {"root": root / "data", "domain": "cartpole", "algorithm": "made_up"}
    words |= {"task": "swingup", "cache": root / "cache", "relabelling": "stored"}
    words |= options
    return [part for name, value in words.items() for part in (f"--{name}", str(value))]


def test_program_tells_what_it_packed_and_names_the_bad_file(tmp_path, capsys):
    buffer = made_up_buffer(tmp_path / "data", "cartpole", [4, 4, 4])
    assert main([*arguments(tmp_path), "--max-transitions", "8"]) == 0
    out, err = capsys.readouterr()
    directory = tmp_path / "cache" / "cartpole" / "made_up" / "swingup"
    assert out.startswith("cartpole swingup, gathered by made_up, rewards stored\n")
    assert "2 episodes of 4 to 4 steps, 8 steps" in out
    assert out.endswith(f"written to {directory}\n") and err == ""
    assert len(TrajectoryFile.open(directory).returns) == 2
    path = buffer.scan()[0]
    path.write_bytes(b"some text")
    assert main(arguments(tmp_path, cache=tmp_path / "other")) == 1
    expected = f"error: {path}: unreadable npz (BadZipFile: File is not a zip file)\n"
    assert capsys.readouterr().err == expected
