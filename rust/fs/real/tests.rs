#![allow(clippy::unwrap_used)]

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use super::*;

fn both(check: impl Fn(RealFs, &OwnedFd, &Path)) {
    for confinement in [Confinement::Openat2, Confinement::Checked] {
        let temp = tempfile::tempdir().unwrap();
        let fs = RealFs::with(confinement);
        let dir = fs.open_root(temp.path().to_str().unwrap(), false).unwrap();
        check(fs, &dir, temp.path());
    }
}

#[test]
fn paths_stay_beneath_on_both_ways() {
    // Promise: no link is followed, no way leads up, and both confinements give the same errors.
    both(|fs, dir, path| {
        std::fs::create_dir_all(path.join("a/b")).unwrap();
        std::fs::write(path.join("a/b/f"), "x").unwrap();
        symlink("a", path.join("link")).unwrap();
        symlink("a/b/f", path.join("file-link")).unwrap();
        symlink("/etc", path.join("out")).unwrap();
        fs.open(dir, "a/b/f").unwrap();
        let errno = |path| fs.open(dir, path).unwrap_err();
        assert_eq!(errno("link/b/f"), Errno::LOOP);
        assert_eq!(errno("file-link"), Errno::LOOP);
        assert_eq!(errno("out/passwd"), Errno::LOOP);
        assert_eq!(errno("a/../a/b/f"), Errno::INVAL);
        assert_eq!(errno("/etc/passwd"), Errno::INVAL);
        assert_eq!(errno("a//b/f"), Errno::INVAL);
        assert_eq!(errno("a/b"), Errno::ISDIR);
        assert_eq!(errno("a/b/g"), Errno::NOENT);
        assert_eq!(errno("a/b/f/g"), Errno::NOTDIR);
        assert_eq!(fs.open_dir(dir, "link").unwrap_err(), Errno::LOOP);
        assert_eq!(fs.open_dir(dir, "a/b/f").unwrap_err(), Errno::NOTDIR);
        assert_eq!(fs.stat(dir, "link").unwrap().kind, FileKind::Link);
        assert_eq!(fs.stat(dir, "link/b").unwrap_err(), Errno::LOOP);
        assert_eq!(fs.stat(dir, "a/b/f").unwrap().size, 1);
        assert_eq!(fs.unlink(dir, "a/b").unwrap_err(), Errno::INVAL);
    });
}

#[test]
fn special_files_never_block() {
    // Promise: a FIFO or a socket in the way is EINVAL at once, not a hang.
    both(|fs, dir, path| {
        let mode = Mode::from_raw_mode(0o600);
        fs::mknodat(dir, "fifo", FileType::Fifo, mode, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path.join("socket")).unwrap();
        for name in ["fifo", "socket"] {
            assert_eq!(fs.open(dir, name).unwrap_err(), Errno::INVAL);
            assert_eq!(fs.stat(dir, name).unwrap().kind, FileKind::Other);
        }
    });
}

#[test]
fn a_lock_is_held_once_per_process() {
    // Promise: a second holder in this process is refused, and refusing it does not free the first.
    both(|fs, dir, path| {
        let lock = fs.lock(dir, "LOCK").unwrap();
        assert_eq!(fs.lock(dir, "LOCK").unwrap_err(), Errno::AGAIN);
        let script = "import fcntl,sys\nf=open(sys.argv[1],'r+')\n\
            try: fcntl.lockf(f, fcntl.LOCK_EX|fcntl.LOCK_NB)\nexcept OSError: sys.exit(7)";
        let other = || {
            let mut command = std::process::Command::new("python3");
            command
                .args(["-c", script])
                .arg(path.join("LOCK"))
                .status()
                .unwrap()
                .code()
        };
        assert_eq!(other(), Some(7));
        drop(lock);
        assert_eq!(other(), Some(0));
        fs.lock(dir, "LOCK").unwrap();
    });
}

#[test]
fn modes_listing_and_links() {
    // Promise: the small calls do what the trait says.
    both(|fs, dir, path| {
        let file = fs.create(dir, "f", 0o666).unwrap();
        assert_eq!(fs.create(dir, "f", 0o666).unwrap_err(), Errno::EXIST);
        fs.set_mode(dir, "f", 0o664).unwrap();
        assert_eq!(
            path.join("f").metadata().unwrap().permissions().mode() & 0o7777,
            0o664
        );
        fs.make_dir(dir, "d", 0o777).unwrap();
        fs.set_mode(dir, "d", 0o2775).unwrap();
        assert_eq!(
            path.join("d").metadata().unwrap().permissions().mode() & 0o7777,
            0o2775
        );
        assert_eq!(fs.write_at(&file, b"hello", 3).unwrap(), 5);
        fs.sync_file(&file).unwrap();
        let sub = fs.open_dir(dir, "d").unwrap();
        fs.link(dir, "f", &sub, "g").unwrap();
        assert_eq!(fs.link(dir, "f", &sub, "g").unwrap_err(), Errno::EXIST);
        assert_eq!(fs.stat(dir, "d/g").unwrap().nlink, 2);
        fs.rename(&sub, "g", dir, "h").unwrap();
        fs.sync_dir(dir).unwrap();
        for _ in 0..2 {
            let mut names = Vec::new();
            fs.list(dir, &mut |name, kind| {
                names.push((name.to_string(), kind));
                ControlFlow::Continue(())
            })
            .unwrap();
            names.sort_by(|a, b| a.0.cmp(&b.0));
            let expect = [
                ("d", FileKind::Dir),
                ("f", FileKind::File),
                ("h", FileKind::File),
            ];
            assert_eq!(names, expect.map(|(name, kind)| (name.to_string(), kind)));
        }
        fs.unlink(dir, "h").unwrap();
        fs.remove_dir(dir, "d").unwrap();
    });
}

#[test]
fn a_root_is_made_with_its_parents() {
    // Promise: the user's own path may hold links and missing parents.
    both(|fs, _, path| {
        symlink(path, path.join("self")).unwrap();
        let deep = path.join("self/x/y/z");
        assert_eq!(
            fs.open_root(deep.to_str().unwrap(), false).unwrap_err(),
            Errno::NOENT
        );
        fs.open_root(deep.to_str().unwrap(), true).unwrap();
        fs.open_root(path.join("self").to_str().unwrap(), false)
            .unwrap();
        assert!(path.join("x/y/z").is_dir());
    });
}
