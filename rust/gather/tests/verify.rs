use super::*;
use crate::error::Kind;
use crate::format::{BlockHasher, Layout, TensorSpec, segment_checksum};

on_each_engine!(
    verify_finds_every_flipped_byte_in_a_touched_block,
    verify_notices_another_file_under_the_name,
    equal_tensors_side_by_side_are_verified_apart,
);

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
        segment.checksum = segment_checksum(list).into();
    }
    segments
}

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
        // More rows than its tensor has.
        Segment {
            rows: 8,
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

fn equal_tensors_side_by_side_are_verified_apart() {
    // Promise: segments that continue each other, in place and by checksum, may be of two tensors.
    let bench = Bench::new();
    let spec = |name: &str| TensorSpec {
        name: name.into(),
        dtype: DType::U8,
        shape: vec![64],
    };
    let layout = Layout::plan(1, vec![spec("x.0"), spec("x.1")]).unwrap();
    let mut hasher = BlockHasher::new();
    hasher.update(&[3; 64]);
    let list = hasher.finish();
    let mut file = layout.header(&[list.clone(), list.clone()]);
    file.extend([3; 128]);
    bench.write("v1/a", &file);
    let part = |index: u8| Segment {
        checksum: segment_checksum(&list).into(),
        ..segment(
            "v1/a",
            layout.offset(index.into()),
            64 * u64::from(index),
            64,
            DType::U8,
            &[],
        )
    };
    let batch = vec![request(vec![part(0), part(1)], 0, 128, DType::U8, &[])];
    let filled = bench.gather(batch, true).pop().unwrap().unwrap();
    assert!(filled.out.as_deref() == Some(&[3; 128]));
}
