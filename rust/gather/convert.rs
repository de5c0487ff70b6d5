//! Bytes of stored rows into bytes of destination rows: widening, narrower shapes, fills.

use crate::format::DType;

/// Whether every value of `from` is one of `to`, and this module knows how.
pub(super) fn convertible(from: DType, to: DType) -> bool {
    let wider = to.bits() > from.bits();
    from == to
        || (from.is_unsigned() && wider && (to.is_unsigned() || is_signed(to)))
        || (is_signed(from) && wider && is_signed(to))
}

fn is_signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// The items 0, 1, ..., n - 1; none if the type is no integer or cannot hold them.
pub(super) fn spread_unit(dtype: DType, n: usize) -> Option<Vec<u8>> {
    if !dtype.is_unsigned() && !is_signed(dtype) {
        return None;
    }
    let size = usize::try_from(dtype.item_size()?).ok()?;
    let value_bits = dtype.bits() - u64::from(is_signed(dtype));
    let last = (n as u64).saturating_sub(1);
    if value_bits < 64 && last >> value_bits != 0 {
        return None;
    }
    let mut unit = Vec::new();
    unit.try_reserve_exact(n.checked_mul(size)?).ok()?;
    for id in 0..n as u64 {
        unit.extend_from_slice(&id.to_le_bytes()[..size]);
    }
    Some(unit)
}

/// Repeats `unit` over `out`, whose length is a multiple of the unit's.
pub(super) fn paint(out: &mut [u8], unit: &[u8]) {
    if let &[byte] = unit {
        out.fill(byte);
        return;
    }
    let mut done = unit.len().min(out.len());
    out[..done].copy_from_slice(&unit[..done]);
    while done < out.len() {
        let more = done.min(out.len() - done);
        out.copy_within(..more, done);
        done += more;
    }
}

/// A row as it is stored and as it is wanted; `shape` has the rank of `to_shape` and fits into it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) from: DType,
    pub(super) shape: &'a [usize],
    pub(super) to: DType,
    pub(super) to_shape: &'a [usize],
}

impl Rows<'_> {
    /// Whether stored bytes are destination bytes.
    pub(super) fn are_equal(&self) -> bool {
        self.from == self.to && self.shape == self.to_shape
    }

    /// Whether stored rows leave items of the destination without a value.
    pub(super) fn are_narrower(&self) -> bool {
        self.shape != self.to_shape
    }

    /// Puts whole stored rows into the leading entries of as many destination rows.
    pub(super) fn scatter(&self, stored: &[u8], out: &mut [u8]) {
        // Axes after the last unequal one are contiguous on both sides, and so are the leading
        // entries of that axis: one run.
        let Some(axis) = (0..self.shape.len())
            .rev()
            .find(|&a| self.shape[a] != self.to_shape[a])
        else {
            widen(stored, out, self.from, self.to);
            return;
        };
        let (size, to_size) = (item(self.from), item(self.to));
        let run: usize = self.shape[axis..].iter().product();
        let row: usize = self.shape.iter().product();
        let to_row: usize = self.to_shape.iter().product();
        if row == 0 {
            return;
        }
        let outer = &self.shape[..axis];
        let mut strides = vec![0; axis];
        let mut stride: usize = self.to_shape[axis..].iter().product();
        for (at, dim) in self.to_shape[..axis].iter().enumerate().rev() {
            strides[at] = stride;
            stride *= dim;
        }
        for (stored, out) in stored
            .chunks_exact(row * size)
            .zip(out.chunks_exact_mut(to_row * to_size))
        {
            let mut index = vec![0; axis];
            for run_bytes in stored.chunks_exact(run * size) {
                let at: usize = index
                    .iter()
                    .zip(&strides)
                    .map(|(i, stride)| i * stride)
                    .sum();
                let place = &mut out[at * to_size..(at + run) * to_size];
                widen(run_bytes, place, self.from, self.to);
                for (i, dim) in index.iter_mut().zip(outer).rev() {
                    *i += 1;
                    if *i < *dim {
                        break;
                    }
                    *i = 0;
                }
            }
        }
    }
}

fn item(dtype: DType) -> usize {
    // Types with a fraction of a byte are refused by the plan.
    usize::try_from(dtype.bits() / 8).unwrap_or(1)
}

/// Little-endian items into wider ones of the same value, or a copy.
fn widen(from: &[u8], to: &mut [u8], stored: DType, wanted: DType) {
    macro_rules! each {
        ($from:ty => $to:ty) => {{
            const N: usize = size_of::<$from>();
            const M: usize = size_of::<$to>();
            for (from, to) in from.chunks_exact(N).zip(to.chunks_exact_mut(M)) {
                let mut bytes = [0; N];
                bytes.copy_from_slice(from);
                to.copy_from_slice(&<$to>::from(<$from>::from_le_bytes(bytes)).to_le_bytes());
            }
        }};
    }
    // An unsigned value has the same bytes in the signed and the unsigned wider type.
    match (stored, wanted.bits()) {
        _ if stored == wanted => to.copy_from_slice(from),
        (DType::U8, 16) => each!(u8 => u16),
        (DType::U8, 32) => each!(u8 => u32),
        (DType::U8, 64) => each!(u8 => u64),
        (DType::U16, 32) => each!(u16 => u32),
        (DType::U16, 64) => each!(u16 => u64),
        (DType::U32, 64) => each!(u32 => u64),
        (DType::I8, 16) => each!(i8 => i16),
        (DType::I8, 32) => each!(i8 => i32),
        (DType::I8, 64) => each!(i8 => i64),
        (DType::I16, 32) => each!(i16 => i32),
        (DType::I16, 64) => each!(i16 => i64),
        (DType::I32, 64) => each!(i32 => i64),
        _ => unreachable!("the plan refuses {stored:?} into {wanted:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lossless_integers_widen() {
        // A value never changes silently: floats, bools and narrowing are refused.
        let allowed = |from, to| convertible(from, to);
        assert!(allowed(DType::U8, DType::I16) && allowed(DType::I32, DType::I64));
        assert!(!allowed(DType::U8, DType::I8) && !allowed(DType::U16, DType::I16));
        assert!(!allowed(DType::I8, DType::U16) && !allowed(DType::BOOL, DType::U8));
        assert!(!allowed(DType::F16, DType::F32) && !allowed(DType::BF16, DType::F32));
        assert!(!allowed(DType::U16, DType::U8) && allowed(DType::C64, DType::C64));
        for &from in DType::ALL {
            for &to in DType::ALL
                .iter()
                .filter(|&&to| to != from && convertible(from, to))
            {
                let (n, m) = (item(from), item(to));
                let mut out = vec![9; 2 * m];
                let mut stored = vec![1; 2 * n];
                stored[n..].fill(0xff);
                widen(&stored, &mut out, from, to);
                let high = if is_signed(from) { 0xff } else { 0 };
                let mut expect = vec![0; 2 * m];
                expect[..n].fill(1);
                expect[m..].fill(high);
                expect[m..m + n].fill(0xff);
                assert_eq!(out, expect, "{from:?} {to:?}");
            }
        }
    }

    #[test]
    fn spread_ids_are_distinct_or_refused() {
        // Padding with "spread" never repeats an id within a row.
        assert_eq!(spread_unit(DType::U8, 256).map(|unit| unit[255]), Some(255));
        assert_eq!(spread_unit(DType::U8, 257), None);
        assert_eq!(spread_unit(DType::I8, 129), None);
        assert_eq!(
            spread_unit(DType::I8, 128).map(|unit| unit.len()),
            Some(128)
        );
        assert_eq!(spread_unit(DType::U16, 3), Some(vec![0, 0, 1, 0, 2, 0]));
        assert_eq!(spread_unit(DType::F32, 3), None);
    }

    #[test]
    fn narrower_rows_fill_the_leading_entries() {
        // [2, 1, 2] into [2, 2, 3]: item (i, j, k) keeps its index, the rest stays as painted.
        let rows = Rows {
            from: DType::U8,
            shape: &[2, 1, 2],
            to: DType::U16,
            to_shape: &[2, 2, 3],
        };
        let mut out = vec![0; 24];
        paint(&mut out, &[7, 7]);
        rows.scatter(&[1, 2, 3, 4], &mut out);
        let items: Vec<u16> = out
            .chunks(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
            .collect();
        let f = 0x0707;
        assert_eq!(items, [1, 2, f, f, f, f, 3, 4, f, f, f, f]);
    }
}
