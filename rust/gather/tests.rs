#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use super::*;
use crate::error::Kind;
use crate::format::{BlockHasher, Layout, TensorSpec, segment_checksum};
use crate::fs::real::RealFs;

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
        checksum: String::new(),
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
            let inside = winner.filter(|s| index.iter().zip(&s.shape).all(|(i, dim)| i < dim));
            let value = match (inside, &request.fill) {
                (Some(s), _) => {
                    let from = DType::from_numpy(&s.dtype).unwrap();
                    let width = from.bits() / 8;
                    let flat = index
                        .iter()
                        .zip(&s.shape)
                        .fold(0, |at, (i, dim)| at * dim + i);
                    let stored: u64 = s.shape.iter().product();
                    let at = s.offset + ((row - s.pos) * stored + flat) * width;
                    let bytes = std::fs::read(bench.root.path().join(&s.file)).unwrap();
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

#[test]
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

#[test]
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
        let expect = |i: usize| (10..110).contains(&(i / 1024 / width)) && i % width == 0;
        assert!(
            out.iter()
                .enumerate()
                .all(|(i, &b)| b == if expect(i) { 7 } else { 0 })
        );
        assert_eq!(valid.iter().map(|&b| usize::from(b)).sum::<usize>(), 100);
    }
}

#[test]
fn claims_are_checked_before_anything_is_read() {
    // Promise: overflow, unknown types, shapes that do not fit, bad names: one clear ValueError each.
    let bench = Bench::new();
    bench.write("v1/a", &[0; 100]);
    let good = segment("v1/a", 0, 0, 10, DType::U8, &[2]);
    let bad = [
        Segment {
            offset: u64::MAX,
            ..good.clone()
        },
        Segment {
            pos: u64::MAX,
            ..good.clone()
        },
        Segment {
            rows: u64::MAX,
            ..good.clone()
        },
        Segment {
            shape: vec![3],
            ..good.clone()
        },
        Segment {
            shape: vec![],
            ..good.clone()
        },
        Segment {
            shape: vec![2, 1],
            ..good.clone()
        },
        Segment {
            dtype: "int8".into(),
            ..good.clone()
        },
        Segment {
            dtype: "uint128".into(),
            ..good.clone()
        },
        Segment {
            dtype: "bool".into(),
            ..good.clone()
        },
        Segment {
            file: "../a".into(),
            ..good.clone()
        },
        Segment {
            file: "/v1/a".into(),
            ..good.clone()
        },
        Segment {
            file: String::new(),
            ..good.clone()
        },
    ];
    for segment in bad {
        let text = format!("{segment:?}");
        let error = bench
            .one(request(vec![segment], 0, 10, DType::U16, &[2]))
            .unwrap_err();
        assert!(matches!(error.kind, Kind::Invalid(_)), "{text} {error}");
        assert!(error.to_string().contains("segment 0"), "{error}");
    }
    let huge = vec![u64::MAX, u64::MAX];
    for (lo, hi, shape) in [
        (1, 0, &[2][..]),
        (0, u64::MAX, &[2]),
        (0, 1, &huge),
        (0, 1, &huge[1..]),
    ] {
        let error = bench
            .one(request(vec![], lo, hi, DType::U8, shape))
            .unwrap_err();
        assert!(matches!(error.kind, Kind::Invalid(_)), "{error}");
    }
    let mut spread = request(vec![], 0, 1, DType::F32, &[2]);
    spread.fill = Fill::Spread;
    assert!(matches!(
        bench.one(spread).unwrap_err().kind,
        Kind::Invalid(_)
    ));
    let mut short = [0; 19];
    let mut one = request(vec![good], 0, 10, DType::U8, &[2]);
    one.out = Some(&mut short);
    let error = bench.gather(vec![one], false).pop().unwrap().unwrap_err();
    assert!(error.to_string().contains("19 bytes"), "{error}");
}

#[test]
fn a_file_too_short_is_corrupt_and_costs_no_memory() {
    // Promise: nothing is allocated for a claim that the file cannot back.
    let bench = Bench::new();
    bench.write("v1/a", &[0; 100]);
    let claim = segment("v1/a", 0, 0, 1 << 40, DType::U8, &[1 << 10]);
    let error = bench
        .one(request(vec![claim], 0, 1 << 40, DType::U8, &[1 << 10]))
        .unwrap_err();
    assert!(
        matches!(error.kind, Kind::Corrupt(_)) && error.path == "v1/a",
        "{error}"
    );
    let edge = segment("v1/a", 1, 0, 100, DType::U8, &[]);
    assert!(
        bench
            .one(request(vec![edge.clone()], 0, 100, DType::U8, &[]))
            .is_err()
    );
    // Also where only rows that exist are asked for: the claim as a whole is wrong.
    assert!(
        bench
            .one(request(vec![edge.clone()], 0, 5, DType::U8, &[]))
            .is_err()
    );
    // But not where nothing of it is asked for.
    assert!(
        bench
            .one(request(vec![edge], 100, 105, DType::U8, &[]))
            .is_ok()
    );
}

#[test]
fn empty_things_are_fine() {
    // Promise: no rows, no segments, zero-size shapes and scalars need no special care from callers.
    let bench = Bench::new();
    bench.write("v1/a", &[5; 100]);
    let gone = segment("v1/gone", 1 << 50, 0, 5, DType::U8, &[0, 7]);
    let (out, valid) = bench
        .one(request(vec![gone], 0, 6, DType::U8, &[0, 9]))
        .unwrap();
    assert_eq!((out, valid), (vec![], vec![1, 1, 1, 1, 1, 0]));
    let narrow = segment("v1/gone", 0, 1, 2, DType::U8, &[0]);
    let (out, valid) = bench
        .one(request(vec![narrow], 0, 3, DType::U8, &[2]))
        .unwrap();
    assert_eq!((out, valid), (vec![0; 6], vec![0, 1, 1]));
    assert_eq!(
        bench.one(request(vec![], 7, 7, DType::F64, &[3])).unwrap(),
        (vec![], vec![])
    );
    let scalar = segment("v1/a", 98, 3, 2, DType::U8, &[]);
    let (out, _) = bench
        .one(request(vec![scalar], 3, 6, DType::U16, &[]))
        .unwrap();
    assert_eq!(out, [5, 0, 5, 0, 0, 0]);
}

#[test]
fn one_bad_request_does_not_stop_the_others() {
    // Promise: one result per request; a missing file is that request's error, with its name.
    let bench = Bench::new();
    bench.write("v1/a", &[5; 100]);
    std::fs::create_dir(bench.root.path().join("v1/dir")).unwrap();
    std::os::unix::fs::symlink("a", bench.root.path().join("v1/link")).unwrap();
    let names = ["v1/a", "v1/gone", "v1/dir", "v1/link", "v2/gone", "v1/a"];
    let batch = names.map(|name| {
        request(
            vec![segment(name, 0, 0, 4, DType::U8, &[])],
            0,
            4,
            DType::U8,
            &[],
        )
    });
    let results = bench.gather(batch.into(), false);
    let errno = |at: usize| results[at].as_ref().unwrap_err().errno();
    assert!(results[0].is_ok() && results[5].is_ok());
    assert_eq!([errno(1), errno(4)], [Some(Errno::NOENT); 2]);
    assert_eq!(
        [errno(2), errno(3)],
        [Some(Errno::ISDIR), Some(Errno::LOOP)]
    );
    assert_eq!(results[1].as_ref().unwrap_err().path, "v1/gone");
}

#[test]
fn more_files_than_descriptors() {
    // Promise: a batch, and a single request, over many more files than may be open at once.
    let bench = Bench::new();
    let names: Vec<String> = (0..3000).map(|i| format!("v{}/f{i}", i % 3)).collect();
    for (i, name) in (0_u16..).zip(&names) {
        bench.write(name, &i.to_le_bytes());
    }
    let each = |(i, name): (u64, &String)| segment(name, 0, i, 1, DType::U16, &[]);
    let segments: Vec<_> = (0..).zip(&names).map(each).collect();
    let all = request(segments.clone(), 0, 3000, DType::U16, &[]);
    let singles = segments
        .iter()
        .rev()
        .map(|s| request(vec![s.clone()], s.pos, s.pos + 1, DType::U16, &[]));
    let batch = singles.chain([all]).collect();
    let results = bench.gather(batch, false);
    let expect: Vec<u8> = (0_u16..3000).flat_map(u16::to_le_bytes).collect();
    assert_eq!(
        &results[3000].as_ref().unwrap().out.as_deref().unwrap(),
        &expect
    );
    for (i, result) in results[..3000].iter().rev().enumerate() {
        assert_eq!(
            result.as_ref().unwrap().out.as_deref().unwrap(),
            &expect[2 * i..2 * i + 2]
        );
    }
}

#[test]
fn offsets_beyond_two_gigabytes() {
    // Promise: positions in a file are 64 bits wide everywhere.
    let bench = Bench::new();
    bench.write("v1/a", &[]);
    let mut file = File::options()
        .write(true)
        .open(bench.root.path().join("v1/a"))
        .unwrap();
    file.seek(SeekFrom::Start((5 << 30) + 3)).unwrap();
    file.write_all(&[1, 2, 3, 4]).unwrap();
    let far = segment("v1/a", 1, 0, (5 << 30) + 6, DType::U8, &[]);
    let (lo, hi) = ((5 << 30) + 1, (5 << 30) + 6);
    assert_eq!(
        bench
            .one(request(vec![far], lo, hi, DType::U8, &[]))
            .unwrap()
            .0,
        [0, 1, 2, 3, 4]
    );
}

#[test]
fn large_reads_are_exact() {
    // Promise: pieces cut for several threads, at any phase, join to exactly the stored bytes.
    let bench = Bench::new();
    let mut random = Random(2);
    let bytes = random.bytes((9 << 20) + 77);
    bench.write("v1/a", &bytes);
    let whole = segment("v1/a", 77, 0, 9 << 10, DType::U8, &[1024]);
    let (out, _) = bench
        .one(request(vec![whole.clone()], 0, 9 << 10, DType::U8, &[1024]))
        .unwrap();
    assert!(out == bytes[77..]);
    let (out, _) = bench
        .one(request(
            vec![whole.clone()],
            5,
            9 << 10,
            DType::U32,
            &[1024],
        ))
        .unwrap();
    assert!(
        out.chunks(4)
            .map(|b| b[0])
            .eq(bytes[77 + 5 * 1024..].iter().copied())
    );
    let (out, _) = bench
        .one(request(vec![whole], 1, 8 << 10, DType::U8, &[1025]))
        .unwrap();
    assert!(
        out.chunks(1025)
            .zip(bytes[77 + 1024..].chunks(1024))
            .all(|(a, b)| a[..1024] == *b)
    );
}

/// A payload file with tensors "a" ([3000, 1024] u8) and "b" ([7, 3] u16), and their segments.
fn payload(bench: &Bench, name: &str, random: &mut Random) -> [Segment; 2] {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec {
        name: name.into(),
        dtype,
        shape: shape.into(),
    };
    let specs = vec![
        spec("a", DType::U8, &[3000, 1024]),
        spec("b", DType::U16, &[7, 3]),
    ];
    let layout = Layout::plan(1, specs).unwrap();
    let data = [random.bytes(3000 * 1024), random.bytes(42)];
    let lists = data.each_ref().map(|bytes| {
        let mut hasher = BlockHasher::new();
        hasher.update(bytes);
        hasher.finish()
    });
    let mut file = layout.header(&lists);
    for &index in layout.order() {
        file.extend(&data[index]);
    }
    bench.write(name, &file);
    let mut segments = [
        segment(name, layout.offset(0), 0, 3000, DType::U8, &[1024]),
        segment(name, layout.offset(1), 0, 7, DType::U16, &[3]),
    ];
    for (segment, list) in segments.iter_mut().zip(&lists) {
        segment.checksum = segment_checksum(list);
    }
    segments
}

#[test]
fn verify_finds_every_flipped_byte_in_a_touched_block() {
    // Promise: verify=True notices any change within the 1 MiB blocks that are read, and no other.
    let bench = Bench::new();
    let mut random = Random(3);
    let [a, b] = payload(&bench, "v1/a", &mut random);
    let path = bench.root.path().join("v1/a");
    let clean = std::fs::read(&path).unwrap();
    let read = |s: &Segment, lo, hi, dtype, verify| {
        let batch = vec![request(vec![s.clone()], lo, hi, dtype, &s.shape)];
        bench.gather(batch, verify).pop().unwrap()
    };
    let start = usize::try_from(a.offset).unwrap();
    for (lo, hi) in [(0_usize, 3000), (1500, 1501), (1000, 1100), (2999, 3000)] {
        for dtype in [DType::U8, DType::U16] {
            std::fs::write(&path, &clean).unwrap();
            let (lo64, hi64) = (lo as u64, hi as u64);
            let filled = read(&a, lo64, hi64, dtype, true).unwrap();
            let step = usize::try_from(dtype.bits() / 8).unwrap();
            let expect = &clean[start + lo * 1024..start + hi * 1024];
            assert!(filled.out.unwrap().iter().step_by(step).eq(expect));
            for _ in 0..8 {
                let at = usize::try_from(random.below(3000 * 1024)).unwrap();
                let mut torn = clean.clone();
                torn[start + at] ^= 0x10;
                std::fs::write(&path, &torn).unwrap();
                let block = at >> 20;
                let touched = (lo * 1024) >> 20 <= block && block <= (hi * 1024 - 1) >> 20;
                let result = read(&a, lo64, hi64, dtype, true);
                assert_eq!(result.is_err(), touched, "{lo}..{hi} {at}");
                if let Err(error) = result {
                    assert!(
                        matches!(error.kind, Kind::Corrupt(_))
                            && error.to_string().contains("\"a\"")
                    );
                }
                assert!(read(&a, lo64, hi64, dtype, false).is_ok());
            }
        }
    }
    std::fs::write(&path, &clean).unwrap();
    assert!(read(&b, 2, 5, DType::U32, true).is_ok());
}

#[test]
fn verify_notices_another_file_under_the_name() {
    // Promise: a segment's bytes come from the tensor that it was made of, or not at all.
    let bench = Bench::new();
    let mut random = Random(4);
    let [a, b] = payload(&bench, "v1/a", &mut random);
    let [_, other] = payload(&bench, "v1/b", &mut random);
    let mut wrong = vec![
        Segment {
            file: "v1/b".into(),
            ..a.clone()
        },
        Segment {
            offset: b.offset,
            ..other.clone()
        },
        Segment {
            offset: a.offset + 3000 * 1024 - 20,
            ..b.clone()
        },
        Segment {
            offset: 16,
            ..b.clone()
        },
    ];
    wrong[1].file = "v1/a".into();
    bench.write(
        "v1/c",
        &std::fs::read(bench.root.path().join("v1/a")).unwrap()[4096..],
    );
    wrong.push(Segment {
        file: "v1/c".into(),
        offset: 0,
        ..a
    });
    for segment in wrong {
        let text = format!("{segment:?}");
        let shape = segment.shape.clone();
        let dtype = DType::from_numpy(&segment.dtype).unwrap();
        let batch = vec![request(vec![segment], 0, 3, dtype, &shape)];
        let error = bench.gather(batch, true).pop().unwrap().unwrap_err();
        assert!(matches!(error.kind, Kind::Corrupt(_)), "{text} {error}");
    }
}

#[test]
fn a_stopped_batch_ends() {
    // Promise: once the flag is set, nothing more is read.
    let bench = Bench::new();
    bench.write("v1/a", &[1; 10]);
    let (fs, dir) = real(bench.root.path());
    let stop = AtomicBool::new(true);
    let source = Source {
        fs: &fs,
        dir: &dir,
        pool: &bench.pool,
        stop: &stop,
        verify: false,
    };
    let batch = vec![request(
        vec![segment("v1/a", 0, 0, 10, DType::U8, &[])],
        0,
        10,
        DType::U8,
        &[],
    )];
    assert_eq!(
        gather(&source, batch).pop().unwrap().unwrap_err().errno(),
        Some(Errno::INTR)
    );
}
