"""Where parameters lie in Megatron-Core's buffers, by hand."""

from __future__ import annotations

from spbench.impls.backends.buffer_layout import BucketLayout, Sharding, laid_out


def test_an_unsharded_buffer_has_no_padding() -> None:
    assert laid_out([100, 30, 50], [False] * 3, None, None) == [BucketLayout(0, 180, (2, 1, 0), (0, 50, 80))]
    buckets = laid_out([100, 30, 50], [False] * 3, 60, None)
    assert [(b.start, b.end, b.members) for b in buckets] == [(0, 80, (2, 1)), (80, 180, (0,))]


def test_a_sharded_buffer_is_padded() -> None:
    """Starts of parameters to multiples of 64 elements, ends of buckets to those of the ranks and of 128."""
    [bucket] = laid_out([100, 30, 50], [False] * 3, None, Sharding(3))
    assert (bucket.starts, bucket.end) == ((0, 64, 128), 384)
    assert bucket.shard(1, 3) == (128, 256)
    assert laid_out([100], [False], None, Sharding(8, high_bandwidth=True))[0].end == 2**16


def test_a_tied_embedding_has_a_bucket_of_its_own() -> None:
    """At the buffer's end on the first stage, at its beginning on the last, and cut alike."""
    for elements, alone in (([500, 30], [True, False]), ([30, 500], [False, True])):
        buckets = laid_out(elements, alone, None, Sharding(4))
        assert [b.members for b in buckets] == [(1,), (0,)]
        tied = buckets[1 - alone.index(True)]
        assert (tied.end - tied.start, tied.starts[0] - tied.start) == (512, 0)
    assert len(laid_out([500, 30], [True, False], None, None)) == 1
