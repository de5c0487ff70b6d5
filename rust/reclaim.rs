//! Reclaim: unlink files that nobody holds.

use rustix::io::Errno;

use crate::error::Context;
use crate::fs::{Fs, whole};
use crate::names::check_sweepable;
use crate::store::Store;
use crate::{Error, Result};

impl<F: Fs> Store<F> {
    /// Unlinks each file; the bytes that this freed (0 while a pin holds them), or none if it was
    /// already gone. Only files of version directories, temporaries too. Owner only.
    pub fn reclaim(&self, files: &[String]) -> Result<Vec<Result<Option<u64>>>> {
        self.require_owner("reclaim")?;
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let results = self.in_turn("reclaim", &files, check_sweepable, |dir, name, file| {
            let stat = match self.fs.stat(dir, name) {
                Err(Errno::NOENT) => return Ok(None),
                other => other.context("reclaim", file)?,
            };
            if let Some(errno) = whole::wrong_kind(stat.kind) {
                return Err(Error::os("reclaim", file, errno).with_hint("it is no payload file"));
            }
            match self.fs.unlink(dir, name) {
                Err(Errno::NOENT) => Ok(None),
                other => {
                    other.context("reclaim", file)?;
                    Ok(Some(if stat.nlink == 1 { stat.size } else { 0 }))
                }
            }
        });
        let gone = |result: Result<Option<u64>>| match result {
            // The whole version directory is gone.
            Err(error) if error.errno() == Some(Errno::NOENT) => Ok(None),
            other => other,
        };
        Ok(results.into_iter().map(gone).collect())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::fs::Fs;
    use crate::fs::real::RealFs;
    use crate::fs::sim::SimFs;
    use crate::publish::tests::{payload, sim_store};
    use crate::store::{Store, StoreOptions};

    #[test]
    fn only_payloads_of_the_store_go_and_only_by_the_owner() {
        // Promise: missing is fine, links and directories are never touched, nothing outside is.
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("store");
        let root = path.to_str().unwrap();
        let options = |owner| StoreOptions {
            create: true,
            owner,
            ..StoreOptions::default()
        };
        let owner = Store::<RealFs>::open_path(root, &options(true)).unwrap();
        let files: Vec<_> = owner
            .publish(&[payload(1, b"abc"), payload(1, b"pinned")], false)
            .into_iter()
            .map(|published| published.unwrap().file)
            .collect();
        let size = path.join(&files[0]).metadata().unwrap().len();
        std::fs::hard_link(path.join(&files[1]), temp.path().join("pin")).unwrap();
        std::fs::create_dir(path.join("v1/dir")).unwrap();
        std::os::unix::fs::symlink("../../pin", path.join("v1/link")).unwrap();
        std::os::unix::fs::symlink("..", path.join("v2")).unwrap();
        let ask: Vec<String> = [&files[0], &files[1], "v1/no", "v9/no"]
            .map(String::from)
            .into();
        let other = Store::<RealFs>::open_path(root, &options(false)).unwrap();
        assert!(other.reclaim(&ask).is_err());
        let freed: Vec<_> = owner
            .reclaim(&ask)
            .unwrap()
            .into_iter()
            .map(Result::unwrap)
            .collect();
        assert_eq!(freed, [Some(size), Some(0), None, None]);
        let bad = ["v1/dir", "v1/link", "v2/pin", "../pin", "/etc/passwd", ""].map(String::from);
        assert!(owner.reclaim(&bad).unwrap().iter().all(Result::is_err));
        assert!(temp.path().join("pin").exists());
        let link = path.join("v1/link");
        assert!(link.is_symlink());
        let dead = String::from("v1/.tmp-00-1-2-3");
        std::fs::write(path.join(&dead), "12").unwrap();
        let bad = ["v1/.tmp-/../x", "v1/.tmp-a b", ".tmp-x", "v1/.hidden"].map(String::from);
        assert!(owner.reclaim(&bad).unwrap().iter().all(Result::is_err));
        assert_eq!(owner.reclaim(&[dead]).unwrap().remove(0).unwrap(), Some(2));
    }

    #[test]
    fn the_stores_own_files_are_never_reclaimed() {
        // Bug guarded: reclaim of "STORE" removed the identity of the store, of "LOCK" its lock.
        let fs = SimFs::new();
        let owner = sim_store(&fs).unwrap();
        let file = owner.publish(&[payload(1, b"x")], false).remove(0);
        let file = file.unwrap().file;
        let root = fs.root();
        fs.make_dir(&root, "pins", 0o777).unwrap();
        let pins = fs.open_dir(&root, "pins").unwrap();
        fs.create(&pins, "x", 0o666).unwrap();
        let before = fs.files();
        let bad = ["STORE", "LOCK", "pins/x", "v1", "v1/STORE/x"].map(String::from);
        assert!(owner.reclaim(&bad).unwrap().iter().all(Result::is_err));
        assert_eq!(fs.files(), before);
        assert!(owner.reclaim(&[file]).unwrap().remove(0).unwrap().is_some());
    }
}
