from bench.kv_utilisation import measure


def test_at_least_96_percent_of_the_allocated_slots_hold_live_tokens() -> None:
    result = measure(num_requests=40)
    assert result.paged >= 0.96
    assert result.whole_length < 0.5
    assert result.num_steps > 40


def test_larger_blocks_waste_more() -> None:
    fine, coarse = (measure(num_requests=10, block_size=size, num_blocks=16384 // size) for size in (16, 128))
    assert coarse.paged < fine.paged < 1
