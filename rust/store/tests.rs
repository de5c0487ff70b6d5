#![allow(clippy::unwrap_used)]

use super::*;
use crate::error::Kind;
use crate::fs::sim::SimFs;
use crate::publish::tests::{models, payload};

fn options(owner: bool, run_id: &str) -> StoreOptions {
    let run_id = run_id.to_string();
    StoreOptions {
        create: true,
        owner,
        run_id,
        group_writable: false,
    }
}

fn open(fs: &SimFs, options: &StoreOptions) -> Result<Store<SimFs>> {
    Store::open(fs.clone(), fs.root(), "run/payloads", options)
}

#[test]
fn makers_agree_on_one_identity() {
    // Promise: many processes making a store at once end up with one uuid.
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("a/store");
    let path = path.to_str().unwrap();
    let uuids = threads::map(&[(); 32], 32, |()| {
        let store = Store::<RealFs>::open_path(path, &options(false, "r")).unwrap();
        store.uuid().to_string()
    });
    assert_eq!(uuids[0].len(), 32);
    assert!(uuids.iter().all(|uuid| *uuid == uuids[0]));
    let left = std::fs::read_dir(path).unwrap().count();
    assert_eq!(left, 1, "a temporary is left");
}

#[test]
fn a_store_is_made_whole_or_not_at_all() {
    // Promise: stopped anywhere, STORE is absent or complete, and the next open goes on; with links
    // and without.
    let whole = SimFs::new();
    open(&whole, &options(false, "r")).unwrap();
    for n in 0..whole.operations() {
        let fs = SimFs::new();
        fs.stop_at(n);
        assert!(open(&fs, &options(false, "r")).is_err());
        for after in models().map(|model| fs.power_cut(model)).chain([fs.kill()]) {
            let uuid = open(&after, &options(false, "r"))
                .unwrap()
                .uuid()
                .to_string();
            assert_eq!(open(&after, &StoreOptions::default()).unwrap().uuid(), uuid);
        }
    }
    let fs = SimFs::new();
    fs.refuse_links(true);
    open(&fs, &options(false, "r")).unwrap();
    assert_eq!(fs.files().len(), 1);
}

#[test]
fn one_owner_one_run_one_format() {
    // Promise: a second owner, another run, an unknown format, a torn STORE and a directory that is
    // no store are clear errors that name the store.
    let fs = SimFs::new();
    let none = open(&fs, &StoreOptions::default()).err().unwrap();
    assert_eq!(none.errno(), Some(Errno::NOENT));
    let owner = open(&fs, &options(true, "r")).unwrap();
    assert!(owner.is_owner());
    let second = open(&fs, &options(true, "r")).err().unwrap();
    assert_eq!(second.errno(), Some(Errno::AGAIN));
    assert!(second.to_string().contains("run/payloads"));
    let reader = open(&fs, &options(false, "")).unwrap();
    assert_eq!((reader.run_id(), reader.is_owner()), ("r", false));
    assert!(reader.reclaim(&[]).is_err() && reader.retire(0).is_err());
    drop(owner);
    open(&fs, &options(true, "r")).unwrap();
    let other = open(&fs, &options(false, "s")).err().unwrap();
    assert!(matches!(other.kind, Kind::Invalid(_)));
    for (text, corrupt) in [
        ("{\"format\":2,\"uuid\":\"\",\"run_id\":\"\"}", false),
        ("{", true),
    ] {
        fs.unlink(&fs.root(), "STORE").unwrap();
        let file = fs.create(&fs.root(), "STORE", 0o666).unwrap();
        fs.write_at(&file, text.as_bytes(), 0).unwrap();
        let error = open(&fs, &options(false, "")).err().unwrap();
        assert_eq!(matches!(error.kind, Kind::Corrupt(_)), corrupt, "{error}");
    }
}

#[test]
fn headers_and_syncs_answer_per_file() {
    // Promise: each file has its own answer; a synced one survives a power cut.
    let fs = SimFs::new();
    let store = open(&fs, &options(true, "")).unwrap();
    let file = store
        .publish(&[payload(1, b"abc")], false)
        .remove(0)
        .unwrap()
        .file;
    let ask = [file.clone(), "v1/no".into(), "../x".into()];
    let headers = store.header(&ask);
    assert_eq!(headers[0].as_ref().unwrap().tensors[0].shape, [3]);
    assert_eq!(headers[1].as_ref().unwrap_err().errno(), Some(Errno::NOENT));
    assert!(headers[2].is_err());
    let synced = store.sync(&ask);
    assert!(synced[0].is_ok() && synced[1].is_err() && synced[2].is_err());
    let cut = fs.power_cut(crate::fs::sim::PowerCut::Kept);
    assert_eq!(cut.files()[&file], fs.files()[&file]);
}

#[test]
fn a_lock_is_a_regular_file() {
    // Bug guarded: a FIFO of the name LOCK was taken for the lock; a directory or a link was reported as a
    // filesystem without locks.
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path().to_str().unwrap();
    let lock = temp.path().join("LOCK");
    let odd: [&dyn Fn(); 3] = [
        &|| {
            let dir = rustix::fs::open(root, rustix::fs::OFlags::PATH, 0.into()).unwrap();
            let (kind, mode) = (rustix::fs::FileType::Fifo, 0o600.into());
            rustix::fs::mknodat(&dir, "LOCK", kind, mode, 0).unwrap();
        },
        &|| std::fs::create_dir(&lock).unwrap(),
        &|| std::os::unix::fs::symlink("STORE", &lock).unwrap(),
    ];
    for make in odd {
        make();
        let error = Store::<RealFs>::open_path(root, &options(true, ""));
        let error = error.err().unwrap().to_string();
        assert!(error.contains("LOCK in it is no regular file"), "{error}");
        let _ = std::fs::remove_file(&lock).or_else(|_| std::fs::remove_dir(&lock));
    }
    Store::<RealFs>::open_path(root, &options(true, "")).unwrap();
}
