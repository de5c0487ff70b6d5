#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use super::*;
use crate::format::{DType, FILLER, HEADER_AREA, Header, TENSOR_ALIGN};
use crate::fs::sim::SimFs;
use crate::publish::tests::sim_store;

fn tensor<'a>(name: &'a str, bytes: &'a [u8]) -> TensorToWrite<'a> {
    TensorToWrite {
        name,
        dtype: DType::U8,
        shape: vec![bytes.len() as u64],
        bytes,
    }
}

/// The tensors of every published file, by the reference library and by ours; fillers are zeros.
fn published(fs: &SimFs) -> BTreeMap<String, BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for (path, content) in fs.files() {
        if !path.ends_with(".safetensors") {
            continue;
        }
        Header::parse(&content, content.len() as u64, &path).unwrap();
        let mut tensors = BTreeMap::new();
        for (name, view) in safetensors::SafeTensors::deserialize(&content)
            .unwrap()
            .tensors()
        {
            if name.starts_with(FILLER) {
                assert!(view.data().iter().all(|byte| *byte == 0));
            } else {
                tensors.insert(name, view.data().to_vec());
            }
        }
        files.insert(path, tensors);
    }
    files
}

fn temporaries(fs: &SimFs) -> usize {
    let files = fs.files();
    files.keys().filter(|path| path.contains("/.tmp-")).count()
}

/// Two turns of two fields in one file, published.
fn run(fs: &SimFs, turns: &[Vec<u8>]) -> Result<Vec<Appended>> {
    let mut writer = sim_store(fs)?.writer(1)?;
    let mut all = Vec::new();
    for turn in turns {
        all.extend(writer.append(&[tensor("x", turn), tensor("y", &turn[..1])])?);
    }
    writer.close()?;
    Ok(all)
}

fn turns() -> Vec<Vec<u8>> {
    vec![vec![1; 100], vec![2; 600 << 10]]
}

#[test]
fn a_streamed_file_is_what_was_appended() {
    // Promise: after close each append is a tensor `<field>.<n>` at the offset and with the checksum
    // that it returned, 64-aligned behind a header area of 64 KiB, positions running on.
    let fs = SimFs::new();
    let turns = turns();
    let all = run(&fs, &turns).unwrap();
    let (path, content) = fs
        .files()
        .into_iter()
        .find(|(p, _)| p.starts_with('v'))
        .unwrap();
    let header = Header::parse(&content, content.len() as u64, &path).unwrap();
    assert_eq!(header.data_start, HEADER_AREA);
    assert_eq!(header.metadata["policy_version"], "1");
    for (one, (name, pos)) in all
        .iter()
        .zip([("x.0", 0), ("y.0", 0), ("x.1", 100), ("y.1", 1)])
    {
        let info = header.tensors.iter().find(|t| t.name == name).unwrap();
        assert_eq!((&one.file, one.offset, one.pos), (&path, info.offset, pos));
        assert_eq!(one.checksum, header.checksum(name));
        assert_eq!(one.offset % TENSOR_ALIGN, 0);
    }
    let tensors = &published(&fs)[&path];
    assert_eq!(tensors.len(), 4);
    assert_eq!((&tensors["x.0"], &tensors["x.1"]), (&turns[0], &turns[1]));
    assert_eq!((&tensors["y.0"], &tensors["y.1"]), (&vec![1], &vec![2]));
}

#[test]
fn stopped_anywhere_the_name_is_absent_or_the_file_complete() {
    // Promise: a writer that is killed at any operation leaves its temporary and nothing else.
    let whole = SimFs::new();
    run(&whole, &turns()).unwrap();
    let [want] = published(&whole)
        .into_values()
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    for n in 0..=whole.operations() {
        let fs = SimFs::new();
        fs.stop_at(n);
        let done = run(&fs, &turns()).is_ok();
        assert_eq!(done, n >= whole.operations());
        let after = fs.kill();
        for tensors in published(&after).values() {
            assert_eq!(*tensors, want, "stopped at {n}");
        }
        assert!(!done || published(&after).len() == 1 && temporaries(&after) == 0);
        assert!(published(&after).len() + temporaries(&after) <= 1);
    }
}

#[test]
fn an_error_anywhere_leaves_nothing() {
    // Promise: an error at any operation is the caller's error; no name and no temporary is left,
    // and the writer takes nothing more.
    let start = SimFs::new();
    sim_store(&start).unwrap();
    let whole = start.kill();
    run(&whole, &turns()).unwrap();
    // Operation 0 is the lock.
    for n in 1..whole.operations() {
        for errno in [Errno::IO, Errno::NOSPC, Errno::DQUOT] {
            let fs = start.kill();
            fs.fail_at(n, errno);
            let error = run(&fs, &turns()).unwrap_err();
            assert_eq!(error.errno(), Some(errno), "operation {n}");
            assert!(error.path.starts_with("v1"), "{error}");
            assert!(fs.files().keys().all(|path| !path.starts_with('v')));
            run(&fs, &turns()).unwrap();
        }
    }
    let fs = start.kill();
    let mut writer = sim_store(&fs).unwrap().writer(1).unwrap();
    writer.append(&[tensor("x", b"one")]).unwrap();
    fs.fail_at(fs.operations(), Errno::NOSPC);
    let failed = writer.append(&[tensor("x", b"two")]).unwrap_err();
    assert_eq!(failed.errno(), Some(Errno::NOSPC));
    for error in [
        writer.append(&[tensor("x", b"three")]).unwrap_err(),
        writer.close().unwrap_err(),
        writer.close().unwrap_err(),
    ] {
        assert!(error.to_string().contains("void"), "{error}");
    }
    assert!(fs.files().keys().all(|path| !path.starts_with('v')));
}

#[test]
fn a_full_header_goes_on_in_the_next_file() {
    // Promise: appends without end; what is full is published, whole appends stay together, and
    // after an error or a kill the files published before are complete.
    let fs = SimFs::new();
    let mut writer = sim_store(&fs).unwrap().writer(7).unwrap();
    let mut all = Vec::new();
    for n in 0..1000_u32 {
        let bytes = n.to_le_bytes();
        let one = writer
            .append(&[tensor("x", &bytes), tensor("y", &bytes[..3])])
            .unwrap();
        assert_eq!(one[0].file, one[1].file);
        assert_eq!(
            (one[0].pos, one[1].pos),
            (u64::from(n) * 4, u64::from(n) * 3)
        );
        all.push(one);
    }
    let before = published(&fs.kill());
    assert!((2..10).contains(&before.len()), "{}", before.len());
    assert_eq!(temporaries(&fs), 1);
    assert!(!before.contains_key(&all[999][0].file));
    writer.close().unwrap();
    let files = published(&fs);
    assert_eq!((files.len(), temporaries(&fs)), (before.len() + 1, 0));
    for (n, one) in all.iter().enumerate() {
        let bytes = u32::try_from(n).unwrap().to_le_bytes();
        assert_eq!(files[&one[0].file][&format!("x.{n}")], bytes);
        assert_eq!(files[&one[0].file][&format!("y.{n}")], bytes[..3]);
        let content = &fs.files()[&one[0].file];
        let at = usize::try_from(one[0].offset).unwrap();
        assert_eq!(content[at..at + 4], bytes);
    }
}

#[test]
fn an_error_in_the_next_file_keeps_the_full_ones() {
    // Promise: what was published because its header was full stays readable, whatever comes after.
    let fs = SimFs::new();
    let mut writer = sim_store(&fs).unwrap().writer(7).unwrap();
    let wide = "x".repeat(12 << 10);
    for _ in 0..2 {
        writer.append(&[tensor(&wide, b"1")]).unwrap();
    }
    // Header, rename, then the new file.
    fs.fail_at(fs.operations() + 2, Errno::NOSPC);
    let error = writer.append(&[tensor(&wide, b"1")]).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::NOSPC));
    assert!(writer.close().is_err());
    let counts: Vec<_> = published(&fs).values().map(BTreeMap::len).collect();
    assert_eq!((counts, temporaries(&fs)), (vec![2], 0));
}

#[test]
fn an_append_too_large_for_the_header_area_gets_more_of_it() {
    // Promise: one append always fits a file of its own; the area of the next file is 64 KiB again.
    let fs = SimFs::new();
    let mut writer = sim_store(&fs).unwrap().writer(7).unwrap();
    let names: Vec<_> = (0..1000).map(|n| format!("field{n}")).collect();
    let wide: Vec<_> = names.iter().map(|name| tensor(name, b"abc")).collect();
    let first = writer.append(&[tensor("x", b"1")]).unwrap().remove(0);
    let second = writer.append(&wide).unwrap();
    let long = "x".repeat(4096);
    let third = writer.append(&[tensor(&long, b"2")]).unwrap().remove(0);
    writer.close().unwrap();
    assert_eq!(
        (first.offset, third.offset, third.pos),
        (HEADER_AREA, HEADER_AREA, 0)
    );
    assert!(second[0].offset > HEADER_AREA);
    assert!(second.iter().all(|one| one.file == second[0].file));
    let files = published(&fs);
    assert_eq!((files.len(), files[&second[0].file].len()), (3, 1000));
}

#[test]
fn nothing_appended_is_no_file() {
    // Promise: close and discard are idempotent; after them and after a drop no temporary is left.
    let fs = SimFs::new();
    let store = sim_store(&fs).unwrap();
    let mut writer = store.writer(1).unwrap();
    assert_eq!(writer.append(&[]).unwrap(), []);
    writer.close().unwrap();
    writer.close().unwrap();
    writer.discard();
    assert!(writer.append(&[tensor("x", b"1")]).is_err());
    let mut writer = store.writer(1).unwrap();
    writer.append(&[tensor("x", b"1")]).unwrap();
    writer.discard();
    writer.discard();
    writer.close().unwrap();
    assert!(writer.append(&[tensor("x", b"1")]).is_err());
    let mut writer = store.writer(1).unwrap();
    writer.append(&[tensor("x", b"1")]).unwrap();
    drop(writer);
    assert!(fs.files().keys().all(|path| !path.starts_with('v')));
}

#[test]
fn the_callers_mistakes_change_nothing() {
    // Promise: wrong sizes, names and shapes are refused, and the writer goes on as if never asked.
    let fs = SimFs::new();
    let mut writer = sim_store(&fs).unwrap().writer(1).unwrap();
    writer.append(&[tensor("x", b"1")]).unwrap();
    let before = fs.operations();
    let with = |name, shape: &[u64]| TensorToWrite {
        shape: shape.into(),
        ..tensor(name, b"12")
    };
    for bad in [
        with("", &[2]),
        with("x", &[3]),
        with("x", &[u64::MAX, 2]),
        with("x", &[u64::MAX, 0]),
    ] {
        let error = writer.append(&[tensor("x", b"good"), bad]).unwrap_err();
        assert!(
            matches!(error.kind, crate::error::Kind::Invalid(_)),
            "{error}"
        );
    }
    assert_eq!(fs.operations(), before);
    let next = writer.append(&[with("x", &[2]), tensor("x", b"")]).unwrap();
    assert_eq!((next[0].pos, next[1].pos), (1, 3));
    writer.close().unwrap();
    let files = published(&fs);
    let names: Vec<_> = files[&next[0].file].keys().cloned().collect();
    assert_eq!(names, ["x.0", "x.1", "x.2"]);
}

#[test]
fn a_directory_retired_meanwhile_is_an_error() {
    // Bug guarded: appends and a rename inside a version directory that was moved away succeed
    // silently.
    let start = SimFs::new();
    run(&start, &turns()).unwrap();
    let whole = start.kill();
    run(&whole, &turns()).unwrap();
    for n in 1..whole.operations() {
        let fs = start.kill();
        fs.before(n, |fs| {
            fs.rename(&fs.root(), "v1", &fs.root(), "gone").unwrap();
        });
        let error = run(&fs, &turns()).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::STALE), "operation {n}: {error}");
        let left = fs
            .files()
            .into_keys()
            .filter(|path| path.starts_with("gone/"));
        assert_eq!(left.count(), 1);
    }
}
