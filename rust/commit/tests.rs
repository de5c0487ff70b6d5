#![allow(clippy::unwrap_used)]

use super::*;
use crate::fs::sim::{Handle, PowerCut, SimFs};
use crate::pin::Pinned;
use crate::publish::tests::{models, payload, sim_store};
use crate::store::Store;

const MANIFEST_TEXT: &[u8] = b"{\"step\":2}";

fn checkpoints(fs: &SimFs) -> Io<Handle> {
    whole::ensure_dir(fs, &fs.root(), "checkpoints", false)
}

fn begin(fs: &SimFs, step: u64) -> Result<Commit<SimFs>> {
    let dir = checkpoints(fs).context("open", "checkpoints")?;
    Commit::begin(fs.clone(), dir, "checkpoints", step, "orchestrator")
}

/// Two payloads published without a sync, and a committed step 1 that pins the first.
fn start() -> (SimFs, Vec<String>) {
    let fs = SimFs::new();
    let store = sim_store(&fs).unwrap();
    let published = store.publish(&[payload(1, b"one"), payload(2, b"two")], false);
    let files: Vec<_> = published.into_iter().map(|p| p.unwrap().file).collect();
    checkpoints(&fs).unwrap();
    fs.sync_dir(&fs.root()).unwrap();
    save(&fs, &store, 1, &files[..1], false).unwrap();
    (fs, files)
}

fn save(fs: &SimFs, store: &Store<SimFs>, step: u64, files: &[String], copy: bool) -> Result<()> {
    let mut commit = begin(fs, step)?;
    store.sync(files).into_iter().collect::<Result<Vec<_>>>()?;
    commit
        .pin(store, files, copy)
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    commit.write("state.msgpack", b"state")?;
    commit.finish(MANIFEST_TEXT)
}

/// Whether step N is there; panics if it is there but not complete.
fn complete(image: &SimFs, whole: &SimFs, step: u64, pins: &[String]) -> bool {
    let files = image.files();
    let prefix = format!("checkpoints/step_{step}/orchestrator");
    let found = files
        .keys()
        .any(|path| path.starts_with(&format!("{prefix}/")))
        || image.stat(&image.root(), &prefix).is_ok();
    if !found {
        return false;
    }
    assert_eq!(files[&format!("{prefix}/manifest.json")], MANIFEST_TEXT);
    assert_eq!(files[&format!("{prefix}/state.msgpack")], b"state");
    for pin in pins {
        assert_eq!(
            files[&format!("{prefix}/payloads/{pin}")],
            whole.files()[pin],
            "{pin}"
        );
    }
    true
}

#[test]
fn a_commit_is_absent_or_complete_at_every_stop() {
    // Promise: killed or unplugged at any operation, step 2 is absent or complete and step 1
    // untouched; once finish has returned step 2 is there. With links and with copies.
    for copy in [false, true] {
        let (first, files) = start();
        let whole = first.kill();
        save(&whole, &sim_store(&whole).unwrap(), 2, &files, copy).unwrap();
        for n in 0..=whole.operations() {
            // Unsynced payloads of `first` would count as synced in a copy: replay from scratch.
            let (fs, files) = start();
            let from = fs.operations();
            fs.stop_at(from + n);
            let done = sim_store(&fs)
                .and_then(|store| save(&fs, &store, 2, &files, copy))
                .is_ok();
            assert_eq!(done, n >= whole.operations(), "operation {n}");
            let killed = fs.kill();
            assert!(complete(&killed, &killed, 1, &files[..1]));
            assert!(complete(&killed, &killed, 2, &files) || !done);
            for model in models() {
                let cut = fs.power_cut(model);
                assert!(
                    complete(&cut, &killed, 1, &files[..1]),
                    "stop {n}, {model:?}"
                );
                assert!(
                    complete(&cut, &killed, 2, &files) || !done,
                    "stop {n}, {model:?}"
                );
            }
        }
    }
}

#[test]
fn every_error_is_reported_and_leaves_nothing() {
    // Promise: an error at any operation is reported, no partial component is visible, no temporary
    // is left, step 1 is untouched, and no failed sync is tried again.
    let (whole, files) = start();
    let from = whole.operations();
    save(&whole, &sim_store(&whole).unwrap(), 2, &files, false).unwrap();
    for n in 1..whole.operations() - from {
        for errno in [Errno::IO, Errno::NOSPC] {
            let (fs, files) = start();
            let store = sim_store(&fs).unwrap();
            fs.fail_at(from + n, errno);
            let result = save(&fs, &store, 2, &files, false);
            assert_eq!(result.unwrap_err().errno(), Some(errno), "operation {n}");
            assert!(complete(&fs, &fs, 1, &files[..1]));
            assert!(!complete(&fs, &fs, 2, &files), "operation {n}");
            assert!(
                !fs.files().keys().any(|path| path.contains(".tmp-")),
                "operation {n}"
            );
            assert!(!fs.synced_again(), "operation {n}");
        }
    }
}

#[test]
fn payloads_may_go_once_the_commit_is_there() {
    // Promise: after finish the payloads can be reclaimed and every pin still survives a power cut.
    let (fs, files) = start();
    let store = sim_store(&fs).unwrap();
    save(&fs, &store, 2, &files, false).unwrap();
    let before = fs.kill();
    assert!(store.reclaim(&files).unwrap().iter().all(Result::is_ok));
    fs.sync_dir(&fs.root()).unwrap();
    for version in ["v1", "v2"] {
        fs.sync_dir(&fs.open_dir(&fs.root(), version).unwrap())
            .unwrap();
    }
    for model in models() {
        assert!(
            complete(&fs.power_cut(model), &before, 2, &files),
            "{model:?}"
        );
    }
}

#[test]
fn a_taken_component_is_never_replaced() {
    // Promise: FileExistsError for a component that is there, even an empty directory.
    let (fs, files) = start();
    let store = sim_store(&fs).unwrap();
    let error = save(&fs, &store, 1, &files, false).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EXIST));
    let dir = whole::ensure_dir(&fs, &checkpoints(&fs).unwrap(), "step_2", false).unwrap();
    fs.make_dir(&dir, "orchestrator", 0o777).unwrap();
    let error = save(&fs, &store, 2, &files, false).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EXIST));
    assert!(complete(&fs, &fs, 1, &files[..1]));
}

#[test]
fn pins_answer_per_file() {
    // Promise: missing files, bad names, doubles and impossible links each get their own answer.
    let (fs, files) = start();
    let store = sim_store(&fs).unwrap();
    let mut commit = begin(&fs, 2).unwrap();
    let asked = [&files[0], "v1/no", "v9/no", "../x", &files[0]].map(String::from);
    let results = commit.pin(&store, &asked, false);
    let errno = |i: usize| results[i].as_ref().unwrap_err().errno();
    assert_eq!(results[0].as_ref().unwrap().1, Pinned::Link);
    assert_eq!(results[0], results[4]);
    assert_eq!(
        (errno(1), errno(2), errno(3)),
        (Some(Errno::NOENT), Some(Errno::NOENT), None)
    );
    fs.refuse_links(true);
    let size = fs.files()[&files[1]].len() as u64;
    let results = commit.pin(&store, &files, false);
    assert_eq!(results[0].as_ref().unwrap().1, Pinned::Link);
    assert_eq!(results[1], Ok((size, Pinned::Copy)));
    assert!(commit.write("manifest.json", b"").is_err());
    assert!(commit.write("a/b", b"").is_err());
    commit.abort();
    commit.abort();
    assert!(commit.write("state", b"").is_err());
    assert!(!fs.files().keys().any(|path| path.contains(".tmp-")));
}

#[test]
fn a_lost_payload_is_not_pinned_later() {
    // Bug guarded (fsyncgate): the second sync of a file succeeds although its bytes are gone.
    let (fs, files) = start();
    let store = sim_store(&fs).unwrap();
    fs.fail_at(fs.operations(), Errno::NOSPC);
    assert!(store.sync(&files[1..])[0].is_err());
    assert!(store.sync(&files[1..])[0].is_err());
    let mut commit = begin(&fs, 2).unwrap();
    assert!(commit.pin(&store, &files[1..], false)[0].is_err());
    assert!(!fs.synced_again());
}

#[test]
fn an_adopted_directory_is_synced_hashed_and_renamed() {
    // Promise: a directory written by another program becomes a component, with names like
    // `.metadata`; aborted, it stays where it was.
    let (fs, _) = start();
    let run = crate::root::Root::open(fs.clone(), fs.root(), "run");
    let options = crate::root::WriteOptions {
        durable: false,
        exclusive: false,
    };
    run.write("out/shards/0.distcp", b"weights", options)
        .unwrap();
    run.write("out/.metadata", b"meta", options).unwrap();
    let adopt = || {
        let dir = checkpoints(&fs).unwrap();
        Commit::adopt(
            fs.clone(),
            dir,
            "checkpoints",
            2,
            "trainer",
            fs.root(),
            "out",
        )
        .unwrap()
    };
    drop(adopt());
    let mut commit = adopt();
    let files = commit.files().unwrap();
    let expect = |path: &str, data: &[u8]| {
        (
            path.to_string(),
            data.len() as u64,
            crate::format::xxh3_hex(data),
        )
    };
    assert_eq!(
        files,
        [
            expect(".metadata", b"meta"),
            expect("shards/0.distcp", b"weights")
        ]
    );
    commit.finish(MANIFEST_TEXT).unwrap();
    for model in models() {
        let files = fs.power_cut(model).files();
        assert_eq!(
            files["checkpoints/step_2/trainer/shards/0.distcp"],
            b"weights"
        );
        assert_eq!(files["checkpoints/step_2/trainer/.metadata"], b"meta");
        assert_eq!(
            files["checkpoints/step_2/trainer/manifest.json"],
            MANIFEST_TEXT
        );
    }
}

#[test]
fn every_sync_of_a_commit_is_needed() {
    // Ablation: leave out any one sync, and some power cut after finish loses or tears step 2. So
    // the harness sees each of them, and none is there for nothing.
    let (whole, files) = start();
    let from = whole.operations();
    save(&whole, &sim_store(&whole).unwrap(), 2, &files[1..], false).unwrap();
    let mut syncs = 0;
    for n in from..whole.operations() {
        let (fs, files) = start();
        fs.ignore_sync_at(n);
        save(&fs, &sim_store(&fs).unwrap(), 2, &files[1..], false).unwrap();
        if fs.ignored_sync() {
            syncs += 1;
            let caught = [PowerCut::Lost, PowerCut::Kept].map(|model| {
                let cut = fs.power_cut(model);
                std::panic::catch_unwind(|| complete(&cut, &fs, 2, &files[1..])).unwrap_or(false)
            });
            assert!(
                caught.contains(&false),
                "nothing notices that operation {n} is missing"
            );
        }
    }
    // The pin, state and manifest; payloads/v2, payloads, the temporary directory, step_2,
    // checkpoints.
    assert_eq!(syncs, 1 + 2 + 5);
}

#[test]
fn the_real_filesystem_does_the_same() {
    // Promise: pin, write, finish, reclaim and link back work on a real directory; across
    // filesystems a pin is a copy; an adopted path is renamed into place.
    let temp = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    let checkpoints = temp.path().join("checkpoints");
    let root = checkpoints.to_str().unwrap();
    let options = crate::store::StoreOptions {
        create: true,
        owner: true,
        ..Default::default()
    };
    for (step, home) in [(1, temp.path()), (2, elsewhere.path())] {
        let path = home.join("payloads");
        let store = Store::<RealFs>::open_path(path.to_str().unwrap(), &options).unwrap();
        let published = store
            .publish(&[payload(step, b"abc")], false)
            .remove(0)
            .unwrap();
        let mut commit = Commit::begin_path(root, step, "orchestrator", None).unwrap();
        let ask = [published.file.clone()];
        let (size, how) = commit.pin(&store, &ask, false).remove(0).unwrap();
        let same = std::os::unix::fs::MetadataExt::dev(&home.metadata().unwrap())
            == std::os::unix::fs::MetadataExt::dev(&temp.path().metadata().unwrap());
        assert_eq!(how, if same { Pinned::Link } else { Pinned::Copy });
        commit.write("state.msgpack", b"state").unwrap();
        commit.finish(MANIFEST_TEXT).unwrap();
        store.reclaim(&ask).unwrap().remove(0).unwrap();
        let pinned = crate::link_back::PinnedFile {
            file: published.file,
            size,
            checksums: vec![published.tensors[0].1.clone()],
        };
        let pins = checkpoints.join(format!("step_{step}/orchestrator/payloads"));
        let back = store.link_back_path(pins.to_str().unwrap(), &[pinned], false, false);
        let expect = if same { "linked" } else { "copied" };
        assert_eq!(back.unwrap().remove(0).unwrap().word(), expect);
        assert!(store.header(&ask)[0].is_ok());
    }
    let out = temp.path().join("out");
    std::fs::create_dir_all(out.join("a")).unwrap();
    std::fs::write(out.join("a/.metadata"), "m").unwrap();
    let adopt = out.to_str();
    let mut commit = Commit::begin_path(root, 1, "trainer", adopt).unwrap();
    assert_eq!(commit.files().unwrap().len(), 1);
    commit.finish(MANIFEST_TEXT).unwrap();
    assert!(checkpoints.join("step_1/trainer/a/.metadata").exists() && !out.exists());
    std::fs::create_dir_all(&out).unwrap();
    std::fs::write(out.join("manifest.json"), "theirs").unwrap();
    assert!(Commit::begin_path(root, 2, "trainer", adopt).is_err());
    std::fs::remove_file(out.join("manifest.json")).unwrap();
    std::os::unix::fs::symlink("/etc", out.join("link")).unwrap();
    let mut commit = Commit::begin_path(root, 2, "trainer", adopt).unwrap();
    assert!(commit.files().is_err());
    drop(commit);
    assert!(out.exists());
    let names: Vec<_> = std::fs::read_dir(&checkpoints).unwrap().collect();
    assert_eq!(names.len(), 2, "only step_1 and step_2: {names:?}");
}

#[test]
fn only_payloads_are_pinned() {
    // Bug guarded: a queue that named "STORE" had the identity of the store linked into a checkpoint.
    let (fs, files) = start();
    let store = sim_store(&fs).unwrap();
    let mut commit = begin(&fs, 2).unwrap();
    let before = fs.files();
    let bad = ["STORE", "LOCK", "checkpoints/step_1", "v1/x/y"];
    let bad = bad.map(String::from);
    for result in commit.pin(&store, &bad, false) {
        let error = result.unwrap_err();
        assert!(
            matches!(error.kind, crate::error::Kind::Invalid(_)),
            "{error}"
        );
    }
    assert_eq!(fs.files(), before);
    assert!(commit.pin(&store, &files[..1], false)[0].is_ok());
}
