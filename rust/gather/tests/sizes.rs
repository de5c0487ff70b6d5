use std::fs::File;
use std::io::{Seek, SeekFrom, Write};

use super::*;

on_each_engine!(
    more_files_than_descriptors,
    offsets_beyond_two_gigabytes,
    large_reads_are_exact,
    a_stopped_batch_ends,
);

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
        engine: ENGINE.get(),
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
