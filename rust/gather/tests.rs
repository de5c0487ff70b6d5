#![allow(clippy::unwrap_used)]

/// Makes a test for each engine of every function named.
macro_rules! on_each_engine {
    ($($name:ident,)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn auto() {
                on(Engine::Auto, super::$name);
            }
            #[test]
            fn threads() {
                on(Engine::Threads, super::$name);
            }
            #[test]
            fn uring() {
                on(Engine::Uring, super::$name);
            }
        }
    )*};
}

mod claims;
mod faults;
mod sizes;
mod verify;

use std::cell::Cell;
use std::path::Path;

use super::*;
use crate::fs::real::RealFs;

thread_local! {
    /// What reads in the test of this thread.
    static ENGINE: Cell<Engine> = const { Cell::new(Engine::Auto) };
}

fn on(engine: Engine, test: fn()) {
    if let Err(error) = check(engine) {
        return eprintln!("not run: {error}");
    }
    ENGINE.set(engine);
    test();
}

/// A small generator with a fixed seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next().to_le_bytes()[0]).collect()
    }
}

struct Bench {
    root: tempfile::TempDir,
    pool: Pool,
}

impl Bench {
    fn new() -> Self {
        Self {
            root: tempfile::tempdir().unwrap(),
            pool: Pool::new(1 << 30),
        }
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.root.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    fn gather(&self, requests: Vec<Request<'_>>, verify: bool) -> Vec<Result<Filled>> {
        let (fs, dir) = real(self.root.path());
        let stop = AtomicBool::new(false);
        let source = Source {
            fs: &fs,
            dir: &dir,
            pool: &self.pool,
            stop: &stop,
            verify,
            engine: ENGINE.get(),
        };
        gather(&source, requests)
    }

    fn one(&self, request: Request<'_>) -> Result<(Vec<u8>, Vec<u8>)> {
        let filled = self.gather(vec![request], false).pop().unwrap()?;
        Ok((filled.out.unwrap().to_vec(), filled.valid.unwrap().to_vec()))
    }
}

fn real(root: &Path) -> (RealFs, <RealFs as Fs>::Dir) {
    let fs = RealFs::default();
    let dir = fs.open_root(root.to_str().unwrap(), false).unwrap();
    (fs, dir)
}

fn segment(file: &str, offset: u64, pos: u64, rows: u64, dtype: DType, shape: &[u64]) -> Segment {
    let (file, dtype) = (file.into(), dtype.numpy().into());
    Segment {
        file,
        offset,
        pos,
        rows,
        dtype,
        shape: shape.into(),
        checksum: "".into(),
    }
}

fn request<'a>(
    segments: Vec<Segment>,
    lo: u64,
    hi: u64,
    dtype: DType,
    shape: &[u64],
) -> Request<'a> {
    let item = vec![0; usize::try_from(dtype.bits() / 8).unwrap()];
    let shape = shape.to_vec();
    Request {
        segments,
        lo,
        hi,
        dtype,
        shape,
        fill: Fill::Item(item),
        out: None,
        valid: None,
    }
}

/// What a request means, one item at a time.
fn naive(bench: &Bench, request: &Request<'_>) -> (Vec<u8>, Vec<u8>) {
    let size = usize::try_from(request.dtype.bits() / 8).unwrap();
    let items: u64 = request.shape.iter().product();
    let (mut out, mut valid) = (Vec::new(), Vec::new());
    for row in request.lo..request.hi {
        let covers = |s: &&Segment| row >= s.pos && row < s.pos + s.rows;
        let winner = request.segments.iter().rev().find(covers);
        valid.push(u8::from(winner.is_some()));
        for item in 0..items {
            let (mut rest, mut index) = (item, vec![0; request.shape.len()]);
            for axis in (0..index.len()).rev() {
                index[axis] = rest % request.shape[axis];
                rest /= request.shape[axis];
            }
            let inside = winner.filter(|s| index.iter().zip(&*s.shape).all(|(i, dim)| i < dim));
            let value = match (inside, &request.fill) {
                (Some(s), _) => {
                    let from = DType::from_numpy(&s.dtype).unwrap();
                    let width = from.bits() / 8;
                    let flat = index
                        .iter()
                        .zip(&*s.shape)
                        .fold(0, |at, (i, dim)| at * dim + i);
                    let stored: u64 = s.shape.iter().product();
                    let at = s.offset + ((row - s.pos) * stored + flat) * width;
                    let bytes = std::fs::read(bench.root.path().join(&*s.file)).unwrap();
                    let at = usize::try_from(at).unwrap();
                    let mut value = bytes[at..at + usize::try_from(width).unwrap()].to_vec();
                    let signed = from.numpy().starts_with("int") && value.last().unwrap() >> 7 == 1;
                    value.resize(size, if signed { 0xff } else { 0 });
                    value
                }
                (None, Fill::Item(item)) => item.clone(),
                (None, Fill::Spread) => {
                    let id = index.last().copied().unwrap_or(0);
                    id.to_le_bytes()[..size].to_vec()
                }
            };
            out.extend(value);
        }
    }
    (out, valid)
}

on_each_engine!(
    random_batches_agree_with_a_naive_model,
    reused_memory_is_overwritten,
);

fn random_batches_agree_with_a_naive_model() {
    // Promise: any mix of overlaps, gaps, clips, shapes, widths and fills gives what the words say.
    let bench = Bench::new();
    let mut random = Random(1);
    for file in 0..4 {
        bench.write(&format!("v{file}/f.safetensors"), &random.bytes(6000));
    }
    let widths: [&[DType]; 4] = [
        &[DType::U8, DType::U16, DType::U32],
        &[DType::I8, DType::U8, DType::I16],
        &[DType::F32],
        &[DType::BOOL],
    ];
    for round in 0..300 {
        let mut batch = Vec::new();
        for _ in 0..=random.below(4) {
            let family = widths[usize::try_from(random.below(4)).unwrap()];
            let dtype = *family.last().unwrap();
            let rank = random.below(4);
            let shape: Vec<u64> = (0..rank).map(|_| 1 + random.below(4)).collect();
            let lo = random.below(20);
            let mut segments = Vec::new();
            for _ in 0..random.below(7) {
                let from = family[usize::try_from(random.below(family.len() as u64)).unwrap()];
                let narrow = random.below(3) == 0;
                let less = |dim: &u64| if narrow { random.below(dim + 1) } else { *dim };
                let stored: Vec<u64> = shape.iter().map(less).collect();
                let file = format!("v{}/f.safetensors", random.below(4));
                let (offset, rows) = (random.below(100), random.below(12));
                segments.push(segment(
                    &file,
                    offset,
                    random.below(40),
                    rows,
                    from,
                    &stored,
                ));
                if random.below(3) == 0 {
                    // Its continuation, as a streaming writer makes it.
                    let last = segments.last().unwrap().clone();
                    let bytes = stored.iter().product::<u64>() * from.bits() / 8 * rows;
                    segments.push(Segment {
                        offset: offset + bytes,
                        pos: last.pos + rows,
                        ..last
                    });
                }
            }
            let mut one = request(segments, lo, lo + random.below(40), dtype, &shape);
            let integer = !matches!(dtype, DType::F32 | DType::BOOL);
            one.fill = if integer && random.below(2) == 0 {
                Fill::Spread
            } else {
                Fill::Item(random.bytes(usize::try_from(dtype.bits() / 8).unwrap()))
            };
            batch.push(one);
        }
        let expect: Vec<_> = batch.iter().map(|request| naive(&bench, request)).collect();
        let mut own: Vec<_> = expect
            .iter()
            .map(|(out, valid)| (vec![0xaa; out.len()], vec![0xaa; valid.len()]))
            .collect();
        if round % 2 == 0 {
            for (request, (out, valid)) in batch.iter_mut().zip(&mut own) {
                request.out = Some(out);
                request.valid = Some(valid);
            }
        }
        let results = bench.gather(batch, false);
        for (at, result) in results.into_iter().enumerate() {
            let filled = result.unwrap();
            let out = filled.out.as_deref().unwrap_or(&own[at].0);
            let valid = filled.valid.as_deref().unwrap_or(&own[at].1);
            assert!(
                (out, valid) == (&expect[at].0[..], &expect[at].1[..]),
                "round {round} item {at}"
            );
        }
    }
}

fn reused_memory_is_overwritten() {
    // Promise: a pooled result never shows the bytes of an earlier one.
    let bench = Bench::new();
    bench.write("v1/a", &vec![7; 1 << 20]);
    for shape in [&[1024_u64, 1][..], &[1024, 2]] {
        let segments = || vec![segment("v1/a", 0, 10, 100, DType::U8, &[1024, 1])];
        let mut dirty = bench.pool.take(500 * 2048).unwrap();
        dirty.fill(0xee);
        drop(dirty);
        let (out, valid) = bench
            .one(request(segments(), 0, 500, DType::U8, shape))
            .unwrap();
        let width = usize::try_from(shape[1]).unwrap();
        let expect = |i: usize| (10..110).contains(&(i / 1024 / width)) && i.is_multiple_of(width);
        assert!(
            out.iter()
                .enumerate()
                .all(|(i, &b)| b == if expect(i) { 7 } else { 0 })
        );
        assert_eq!(valid.iter().map(|&b| usize::from(b)).sum::<usize>(), 100);
    }
}
