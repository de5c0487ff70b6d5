//! Overlapping segments into disjoint pieces of rows.

use std::collections::BinaryHeap;
use std::ops::Range;

use super::plan::Need;

/// Consecutive rows of the destination with one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) rows: Range<usize>,
    pub(super) covered: bool,
    /// The index in `Plan::needs` and the first byte in the file; none where there is nothing to read.
    pub(super) from: Option<(usize, u64)>,
}

/// Rows `start..stop` of the destination; row `start` is at byte `at` of the file.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) stop: usize,
    pub(super) at: u64,
}

/// Disjoint pieces that cover `0..rows`, and the segments that they read.
pub(super) fn resolve(
    rows: usize,
    spans: &[Span],
    mut needs: Vec<Need>,
) -> (Vec<Piece>, Vec<Need>) {
    let pieces = winners(rows, spans, &needs);
    // The place among the segments that are read, for those that are.
    let mut place = vec![None; needs.len()];
    for (index, _) in pieces.iter().filter_map(|piece| piece.from) {
        place[index] = Some(0);
    }
    for (kept, place) in place.iter_mut().flatten().enumerate() {
        *place = kept;
    }
    let mut pieces = merge(pieces, &needs);
    for (index, _) in pieces.iter_mut().filter_map(|piece| piece.from.as_mut()) {
        *index = place[*index].unwrap_or(0);
    }
    let mut read = place.iter().map(Option::is_some);
    needs.retain(|_| read.next().unwrap_or(false));
    (pieces, needs)
}

/// Which segment each row comes from, in n log n: a sweep over all starts and stops with the latest
/// segment on top of a heap.
fn winners(rows: usize, spans: &[Span], needs: &[Need]) -> Vec<Piece> {
    let mut starts: Vec<usize> = (0..spans.len())
        .filter(|&i| spans[i].start < spans[i].stop)
        .collect();
    starts.sort_by_key(|&i| spans[i].start);
    let mut cuts: Vec<usize> = starts
        .iter()
        .flat_map(|&i| [spans[i].start, spans[i].stop])
        .collect();
    cuts.extend([0, rows]);
    cuts.sort_unstable();
    cuts.dedup();
    let mut starts = starts.into_iter().peekable();
    let mut active = BinaryHeap::new();
    let mut pieces = Vec::new();
    for cut in cuts.windows(2) {
        let (from, to) = (cut[0], cut[1]);
        while let Some(i) = starts.next_if(|&i| spans[i].start <= from) {
            active.push(i);
        }
        while active.peek().is_some_and(|&i| spans[i].stop <= from) {
            active.pop();
        }
        let winner = active.peek().copied();
        let read = winner.filter(|&i| needs[i].row_bytes > 0).map(|i| {
            let skipped = (from - spans[i].start) as u64 * needs[i].row_bytes as u64;
            (i, spans[i].at + skipped)
        });
        pieces.push(Piece {
            rows: from..to,
            covered: winner.is_some(),
            from: read,
        });
    }
    pieces
}

/// Joins neighbours that are one read, or one fill.
fn merge(pieces: Vec<Piece>, needs: &[Need]) -> Vec<Piece> {
    let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        if let Some(last) = merged.last_mut() {
            let joins = match (last.from, piece.from) {
                (None, None) => true,
                (Some((a, start)), Some((b, next))) => {
                    let (one, two) = (&needs[a], &needs[b]);
                    start + last.rows.len() as u64 * one.row_bytes as u64 == next
                        && (a == b
                            || (one.file == two.file
                                && one.dtype == two.dtype
                                && one.shape == two.shape
                                // What is verified lies in one tensor.
                                && one.checksum.is_empty()
                                && two.checksum.is_empty()))
                }
                _ => false,
            };
            if joins && last.covered == piece.covered {
                last.rows.end = piece.rows.end;
                continue;
            }
        }
        merged.push(piece);
    }
    merged
}
