use super::*;
use crate::error::Kind;

on_each_engine!(
    claims_are_checked_before_anything_is_read,
    a_file_too_short_is_corrupt_and_costs_no_memory,
    empty_things_are_fine,
    one_bad_request_does_not_stop_the_others,
);

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
            shape: [3].into(),
            ..good.clone()
        },
        Segment {
            shape: [].into(),
            ..good.clone()
        },
        Segment {
            shape: [2, 1].into(),
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
            file: "".into(),
            ..good.clone()
        },
    ];
    for segment in bad {
        let text = format!("{segment:?}");
        // Alone, and after a good one with which it shares all but what is wrong.
        let behind = vec![good.clone(), segment.clone()];
        for (segments, named) in [(vec![segment], "segment 0"), (behind, "segment 1")] {
            let error = bench
                .one(request(segments, 0, 10, DType::U16, &[2]))
                .unwrap_err();
            assert!(matches!(error.kind, Kind::Invalid(_)), "{text} {error}");
            assert!(error.to_string().contains(named), "{error}");
        }
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
