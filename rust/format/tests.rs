#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use super::*;
use crate::error::Kind;

fn spec(name: &str, dtype: DType, shape: &[u64]) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        dtype,
        shape: shape.into(),
    }
}

fn file_of(specs: &[TensorSpec]) -> (Layout, Vec<u8>) {
    let layout = Layout::plan(7, specs.to_vec()).unwrap();
    let mut bytes = vec![0; usize::try_from(layout.size()).unwrap()];
    let mut lists = Vec::new();
    for index in 0..specs.len() {
        let start = usize::try_from(layout.offset(index)).unwrap();
        let end = start + usize::try_from(layout.len(index)).unwrap();
        for (i, byte) in bytes[start..end].iter_mut().enumerate() {
            *byte = u8::try_from((i * 31 + index) % 251).unwrap();
        }
        let mut hasher = BlockHasher::new();
        bytes[start..end]
            .chunks(PIECE - 1)
            .for_each(|piece| hasher.update(piece));
        lists.push(hasher.finish());
    }
    let header = layout.header(&lists);
    bytes[..header.len()].copy_from_slice(&header);
    (layout, bytes)
}

fn why(json: &str, data: usize) -> String {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    let size = (bytes.len() + data) as u64;
    match Header::parse(&bytes, size, "f").unwrap_err().kind {
        Kind::Corrupt(why) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_reference_reads_ours() {
    // Promise: a payload file is a valid safetensors file, its data section page-aligned.
    let specs: Vec<_> = DType::ALL
        .iter()
        .filter(|dtype| dtype.item_size().is_some())
        .map(|dtype| spec(&format!("t-{}", dtype.name()), *dtype, &[3, 5]))
        .chain([
            spec("empty", DType::F32, &[0, 4]),
            spec("scalar", DType::I64, &[]),
        ])
        .chain([spec("big \"quoted\" é", DType::U8, &[3 << 20])])
        .collect();
    let (layout, bytes) = file_of(&specs);
    assert_eq!(layout.data_start() % ALIGN, 0);
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    let ours = Header::parse(&bytes, bytes.len() as u64, "f").unwrap();
    assert_eq!(theirs.len(), specs.len());
    assert_eq!(ours.metadata["prime_io"], "1");
    assert_eq!(ours.metadata["policy_version"], "7");
    for (index, spec) in specs.iter().enumerate() {
        let view = theirs.tensor(&spec.name).unwrap();
        assert_eq!(view.dtype().to_string(), spec.dtype.name());
        let start = usize::try_from(layout.offset(index)).unwrap();
        assert_eq!(view.data(), &bytes[start..start + view.data().len()]);
        let info = ours
            .tensors
            .iter()
            .find(|info| info.name == spec.name)
            .unwrap();
        assert_eq!(
            (info.offset, info.len),
            (layout.offset(index), layout.len(index))
        );
        assert_eq!(info.shape, spec.shape);
        let list = ours.blocks(&spec.name).unwrap();
        let expect: String = view.data().chunks(1 << 20).map(xxh3_hex).collect();
        assert_eq!(list, expect);
    }
}

#[test]
fn we_read_the_references() {
    // Promise: files written by the reference library are read, checksums then being absent.
    let data = [1_u8; 24];
    let views = [
        ("a", TensorView::new(Dtype::F32, vec![2, 3], &data).unwrap()),
        ("b", TensorView::new(Dtype::F4, vec![48], &data).unwrap()),
        ("c", TensorView::new(Dtype::C64, vec![3], &data).unwrap()),
    ];
    let meta = HashMap::from([("k".to_string(), "v".to_string())]);
    let bytes = serialize(views, Some(meta)).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64, "f").unwrap();
    assert_eq!(header.tensors.len(), 3);
    assert_eq!(header.metadata["k"], "v");
    assert_eq!(header.checksum("a"), "");
    assert!(header.holds(&[]) && !header.holds(&["00".into()]));
}

#[test]
fn same_input_same_bytes_widest_first() {
    // Promise: the layout is a function of its input; widest elements first, then by name.
    let specs = [
        spec("z", DType::U8, &[3]),
        spec("b", DType::F64, &[2]),
        spec("a", DType::U16, &[1]),
        spec("c", DType::I8, &[5]),
    ];
    let (layout, bytes) = file_of(&specs);
    assert_eq!(layout.order(), [1, 2, 3, 0]);
    assert_eq!(file_of(&specs).1, bytes);
    let header = Header::parse(&bytes, bytes.len() as u64, "f").unwrap();
    assert_eq!(header.tensor_at(layout.offset(3)).unwrap().name, "c");
    assert_eq!(header.tensor_at(layout.offset(3) + 4).unwrap().name, "c");
    assert_eq!(header.tensor_at(layout.size()), None);
    assert_eq!(header.tensor_at(0), None);
}

#[test]
fn lying_headers_are_refused() {
    // Promise: overflow, negative, holes, overlaps, duplicates, wrong sizes: one clear error each.
    let one = |shape: &str, offsets: &str| {
        format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
    };
    assert!(why(&one("[1000000000]", "[0,4000000000]"), 8).contains("beyond the end"));
    assert!(why(&one("[4611686018427387904,4]", "[0,0]"), 8).contains("overflows"));
    assert!(why(&one("[4611686018427387904]", "[0,0]"), 8).contains("overflows"));
    assert!(why(&one("[-1]", "[0,8]"), 8).contains("invalid value"));
    assert!(why(&one("[2]", "[8,0]"), 8).contains("do not fit"));
    assert!(why(&one("[2]", "[0,4]"), 8).contains("do not fit"));
    assert!(
        why(
            &one("[0]", "[18446744073709551615,18446744073709551615]"),
            0
        )
        .contains("beyond")
    );
    assert!(why(&one("[1]", "[4,8]"), 8).contains("hole"));
    assert!(why(&one("[2]", "[0,8]"), 9).contains("where its header says"));
    assert!(why(&one("[2.5]", "[0,8]"), 8).contains("header"));
    let entry = "{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}";
    assert!(why(&format!("{{\"a\":{entry},\"a\":{entry}}}"), 4).contains("twice"));
    assert!(why(&format!("{{\"a\":{entry},\"b\":{entry}}}"), 4).contains("overlap"));
    assert!(why("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0).contains("twice"));
    assert!(why("{\"__metadata__\":{\"k\":1}}", 0).contains("header"));
    assert!(why(&one("[2]", "[0,8]").replace("F32", "X9"), 8).contains("unknown dtype"));
    assert!(
        why(
            &one("[2]", "[0,8]").replace("{\"d", "{\"dtype\":\"F32\",\"d"),
            8
        )
        .contains("dup")
    );
    assert!(why("[]", 0).contains("no JSON object"));
    assert!(why("", 0).contains("no JSON object"));
    let list = format!("{{\"__metadata__\":{{\"xxh3:a\":\"0g\"}},\"a\":{entry}}}");
    assert!(why(&list, 4).contains("malformed"));
}

#[test]
fn a_claimed_length_is_not_believed() {
    // Promise: a 100 MB claim in a 200-byte file, or a huge one, allocates nothing.
    for claim in [100_000_000_u64, 100_000_001, u64::MAX, 193] {
        let mut bytes = vec![b'{'; 200];
        bytes[..8].copy_from_slice(&claim.to_le_bytes());
        assert!(Header::parse(&bytes, 200, "f").is_err());
    }
    assert!(Header::parse(b"abc", 3, "f").is_err());
    assert!(Header::parse(b"", 0, "f").is_err());
}

#[test]
fn every_cut_and_many_flips_are_noticed() {
    // Promise: a torn file never passes, and no flipped byte makes the parser panic.
    let (_, bytes) = file_of(&[spec("a", DType::U16, &[9]), spec("b", DType::U8, &[3])]);
    for size in 0..bytes.len() {
        assert!(
            Header::parse(&bytes[..size], size as u64, "f").is_err(),
            "{size}"
        );
    }
    for at in 0..bytes.len().min(600) {
        for flip in [1, 0x20, 0x80, 0xff] {
            let mut torn = bytes.clone();
            torn[at] ^= flip;
            let _ = Header::parse(&torn, torn.len() as u64, "f");
        }
    }
}

#[test]
fn dtypes_are_named_twice() {
    // Promise: names map both ways; big-endian, packed and unknown ones are refused with the list.
    for dtype in DType::ALL {
        assert_eq!(DType::from_name(dtype.name()), Some(*dtype));
        if dtype.item_size().is_some() {
            assert_eq!(DType::from_numpy(dtype.numpy()).unwrap(), *dtype);
        }
    }
    for name in [">f4", "object", "float4_e2m1fn", ""] {
        let text = DType::from_numpy(name).unwrap_err().to_string();
        assert!(
            text.contains("uint16") && text.contains("bfloat16"),
            "{text}"
        );
    }
}

#[test]
fn plans_refuse_what_cannot_be_written() {
    // Promise: duplicate and reserved names, overflow: ValueError before a byte is written.
    let bad = [
        vec![spec("a", DType::U8, &[1]), spec("a", DType::U16, &[1])],
        vec![spec("__metadata__", DType::U8, &[1])],
        vec![spec("", DType::U8, &[1])],
        vec![spec("a", DType::F64, &[u64::MAX, 2])],
        vec![spec("a", DType::U8, &[u64::MAX])],
        vec![spec("a", DType::U8, &[i64::MAX as u64])],
    ];
    for specs in bad {
        assert!(matches!(
            Layout::plan(0, specs).unwrap_err().kind,
            Kind::Invalid(_)
        ));
    }
}
