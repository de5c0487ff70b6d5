//! Probe: which files are there. A missing file is an answer; what could not be found out is an
//! error, and never reported as missing.

mod ring;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use twox_hash::XxHash3_64;

use crate::fs::{FileKind, Fs, Io, check_path, split_path, whole};
use crate::store::{Group, Store, group};
use crate::threads::{self, IO_THREADS};

/// How a probe looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By scanning a directory of which much is asked, else by stat.
    Auto,
    /// Scan every directory once; names that it lacks are confirmed by stat.
    Scan,
    /// Stat every name.
    Stat,
    /// Stat every name on an `io_uring`; on threads where that is blocked. Never chosen by itself: the
    /// kernel serves `statx` from threads of its own.
    Uring,
}

/// What a probe found about one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Whether a regular file of sufficient size is there.
    pub present: bool,
    /// Its size; -1 if it was not asked for or is not known.
    pub size: i64,
    /// 0, or why it is not present: `ENOENT` missing, `ENODATA` short, `EINVAL` no regular file or
    /// no allowed name; anything else means that it could not be found out.
    pub errno: i32,
}

/// From this many names of one directory on, it may be read instead.
const MANY: usize = 64;

/// A scan that has met this many entries per name asked for (and some) is given up: an entry takes a
/// fifth of a stat from a warm cache, and a hundredth of one from a server.
const SPARSE: usize = 4;
const SPARSE_SLOW: usize = 64;
const SOME: usize = 1024;

/// The most names that a thread takes at a time to stat.
const CHUNK: usize = 256;

/// A stat that takes longer than this did not come from a cache.
const SLOW: Duration = Duration::from_micros(50);

impl Answer {
    fn error(errno: Errno) -> Self {
        Self {
            present: false,
            size: -1,
            errno: errno.raw_os_error(),
        }
    }
}

/// What is known of a group: the open directory, or why it has none; for each name whether its listing
/// shows a regular file (empty: it was not listed).
type Opened<F> = Io<(<F as Fs>::Dir, Vec<bool>)>;

impl<F: Fs> Store<F> {
    /// Looks for each file. With `needs`, one number per file, a shorter file counts as gone.
    pub fn probe(
        &self,
        files: &[&str],
        needs: Option<&[u64]>,
        sizes: bool,
        method: Method,
    ) -> Vec<Answer> {
        let sizes = sizes || needs.is_some();
        let mut answers = vec![Answer::error(Errno::INVAL); files.len()];
        let groups = group(files.iter().copied());
        // Freshly opened: that makes an NFS client ask its server again.
        let root = self.fs.open_dir(&self.dir, "");
        let opened = threads::map_long(&groups, IO_THREADS, |group, judge| match &root {
            Ok(root) => {
                // Where sizes are asked for, each name is described anyway: a listing would not save a stat.
                let method = if sizes { Method::Stat } else { method };
                self.open_group(root, group, files, method, judge)
            }
            Err(errno) => Err(*errno),
        });
        let mut unknown = Vec::new();
        for (group, opened) in groups.iter().zip(&opened) {
            match opened {
                Ok((dir, listed)) => {
                    for (at, &index) in group.indices.iter().enumerate() {
                        if listed.get(at) == Some(&true) {
                            answers[index] = Answer {
                                present: true,
                                size: -1,
                                errno: 0,
                            };
                        } else {
                            unknown.push((index, dir));
                        }
                    }
                }
                Err(errno) => {
                    for &index in &group.indices {
                        if check_path(files[index]).is_ok() {
                            answers[index] = Answer::error(*errno);
                        }
                    }
                }
            }
        }
        let need = |index: usize| {
            needs
                .and_then(|needs| needs.get(index))
                .map_or(0, |need| *need)
        };
        if method == Method::Uring {
            unknown = self.on_ring(&unknown, files, &mut answers, |index, stat| {
                judge(stat, need(index), sizes)
            });
        }
        let size = (unknown.len() / (4 * IO_THREADS)).clamp(1, CHUNK);
        let chunks: Vec<_> = unknown.chunks(size).collect();
        let found = threads::map_long(&chunks, IO_THREADS, |chunk, judge| {
            let one = |&(index, dir): &(usize, _)| {
                let answer = self.stat_one(dir, files[index], need(index), sizes);
                judge();
                answer
            };
            chunk.iter().map(one).collect::<Vec<_>>()
        });
        for ((index, _), answer) in unknown.iter().zip(found.into_iter().flatten()) {
            answers[*index] = answer;
        }
        answers
    }

    /// Opens the directory of a group, and lists it where that is the better way.
    fn open_group(
        &self,
        root: &F::Dir,
        group: &Group<'_>,
        files: &[&str],
        method: Method,
        judge: &mut dyn FnMut(),
    ) -> Opened<F> {
        // No name in a place that is not allowed is ever looked for.
        if !group.parent.is_empty() && check_path(group.parent).is_err() {
            return Err(Errno::INVAL);
        }
        let dir = self.fs.open_dir(root, group.parent)?;
        let asked = group.indices.len();
        let limit = match method {
            Method::Scan => usize::MAX,
            Method::Auto if asked >= MANY => {
                let start = Instant::now();
                let _ = self.fs.stat(&dir, split_path(files[group.indices[0]]).1);
                let slow = start.elapsed() > SLOW;
                asked * if slow { SPARSE_SLOW } else { SPARSE } + SOME
            }
            Method::Auto | Method::Stat | Method::Uring => return Ok((dir, Vec::new())),
        };
        let listed = self.listed(&dir, group, files, limit, judge);
        Ok((dir, listed))
    }

    /// Which names of a group are regular files by a listing of at most `limit` entries. Of the others it
    /// says nothing, and if it fails of none: they are asked for one by one, which also says why.
    fn listed(
        &self,
        dir: &F::Dir,
        group: &Group<'_>,
        files: &[&str],
        limit: usize,
        judge: &mut dyn FnMut(),
    ) -> Vec<bool> {
        let hash = Keyed(RandomState::new().hash_one(()));
        let mut places = HashMap::with_capacity_and_hasher(group.indices.len(), hash);
        // A name that is asked for twice has one place.
        let place = |&index: &usize| {
            let next = places.len();
            *places.entry(split_path(files[index]).1).or_insert(next)
        };
        let place_of: Vec<usize> = group.indices.iter().map(place).collect();
        let mut found = vec![false; places.len()];
        let (mut seen, mut met) = (0, 0);
        let result = self.fs.list(dir, &mut |name, kind| {
            seen += 1;
            if seen % 256 == 0 {
                judge();
            }
            if let Some(&place) = places.get(name) {
                met += 1;
                found[place] = kind == FileKind::File && check_path(name).is_ok();
            }
            if seen >= limit || met == places.len() {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        });
        if result.is_err() {
            return Vec::new();
        }
        place_of.into_iter().map(|place| found[place]).collect()
    }

    fn stat_one(&self, dir: &F::Dir, file: &str, need: u64, sizes: bool) -> Answer {
        if check_path(file).is_err() {
            return Answer::error(Errno::INVAL);
        }
        let (parent, name) = split_path(file);
        let stat = match self.fs.stat(dir, name) {
            // The directory was replaced on the server since it was opened: once more from above.
            Err(Errno::STALE) => self.again(parent, name),
            other => other,
        };
        judge(stat.map(|stat| (stat.kind, stat.size)), need, sizes)
    }

    fn again(&self, parent: &str, name: &str) -> Io<crate::fs::Stat> {
        let root = self.fs.open_dir(&self.dir, "")?;
        self.fs.stat(&self.fs.open_dir(&root, parent)?, name)
    }
}

/// XXH3 under a secret key: several times faster than the standard hash, and nobody can make names that
/// collide.
#[derive(Clone)]
struct Keyed(u64);

impl BuildHasher for Keyed {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        self.clone()
    }
}

impl Hasher for Keyed {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = XxHash3_64::oneshot_with_seed(self.0, bytes);
    }

    fn write_u8(&mut self, _: u8) {
        // What a string ends with; there is nothing after it.
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// What an entry, by its kind and size, is to a probe.
fn judge(stat: Io<(FileKind, u64)>, need: u64, sizes: bool) -> Answer {
    let (kind, len) = match stat {
        Ok(stat) => stat,
        Err(errno) => return Answer::error(errno),
    };
    if let Some(errno) = whole::wrong_kind(kind) {
        return Answer::error(errno);
    }
    let size = if sizes {
        i64::try_from(len).unwrap_or(i64::MAX)
    } else {
        -1
    };
    if len < need {
        return Answer {
            size,
            ..Answer::error(Errno::NODATA)
        };
    }
    Answer {
        present: true,
        size,
        errno: 0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fs::real::{Confinement, RealFs};
    use crate::store::StoreOptions;

    #[test]
    fn all_ways_agree_on_everything_odd() {
        // Promise: scan, stat, io_uring and auto give the same answers on both confinements: present, missing,
        // short, links, directories, FIFOs, bad names; an unreadable place is never "missing".
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path();
        let options = StoreOptions {
            create: true,
            ..StoreOptions::default()
        };
        Store::<RealFs>::open_path(path.to_str().unwrap(), &options).unwrap();
        std::fs::create_dir_all(path.join("v1/dir")).unwrap();
        for i in 0..200 {
            std::fs::write(path.join(format!("v1/f{i}")), vec![0; i]).unwrap();
        }
        std::os::unix::fs::symlink("f1", path.join("v1/link")).unwrap();
        std::os::unix::fs::symlink("v1", path.join("v2")).unwrap();
        let dir = rustix::fs::open(path.join("v1"), rustix::fs::OFlags::PATH, 0.into()).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(&dir, "fifo", rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let mut files: Vec<String> = (0..300).map(|i| format!("v1/f{i}")).collect();
        let odd = [
            ("v1/dir", Errno::INVAL),
            ("v1/link", Errno::LOOP),
            ("v1/fifo", Errno::INVAL),
            ("v2/f1", Errno::LOOP),
            ("v3/f1", Errno::NOENT),
            ("v1/f1/x", Errno::NOTDIR),
            ("../x", Errno::INVAL),
            ("", Errno::INVAL),
            ("/etc/passwd", Errno::INVAL),
            ("v1/.tmp-1", Errno::INVAL),
        ];
        files.extend(odd.iter().map(|(file, _)| (*file).to_string()));
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let needs: Vec<u64> = (0..files.len() as u64).map(|i| i.min(150)).collect();
        for confinement in [Confinement::Openat2, Confinement::Checked] {
            let fs = RealFs::with(confinement);
            let dir = fs.open_root(path.to_str().unwrap(), false).unwrap();
            let subject = Store::open(fs, dir, "t", &StoreOptions::default()).unwrap();
            for method in [Method::Auto, Method::Scan, Method::Stat, Method::Uring] {
                let plain = subject.probe(&files, None, false, method);
                let with_size = subject.probe(&files, None, true, method);
                let beyond: Vec<u64> = needs.iter().map(|need| need + 1).collect();
                let enough = subject.probe(&files, Some(&needs), false, method);
                let cut = subject.probe(&files, Some(&beyond), false, method);
                for i in 0..300 {
                    let size = i64::try_from(i).unwrap();
                    let exists = i < 200;
                    let errno = if exists {
                        0
                    } else {
                        Errno::NOENT.raw_os_error()
                    };
                    assert_eq!(
                        plain[i],
                        Answer {
                            present: exists,
                            size: -1,
                            errno
                        }
                    );
                    let size = if exists { size } else { -1 };
                    assert_eq!(
                        with_size[i],
                        Answer {
                            present: exists,
                            size,
                            errno
                        }
                    );
                    assert_eq!(enough[i], with_size[i]);
                    if i <= 150 {
                        let errno = Errno::NODATA.raw_os_error();
                        assert_eq!(
                            cut[i],
                            Answer {
                                present: false,
                                size,
                                errno
                            }
                        );
                    }
                }
                for (i, (file, errno)) in odd.iter().enumerate() {
                    for answers in [&plain, &with_size, &enough] {
                        assert_eq!(answers[300 + i], Answer::error(*errno), "{file} {method:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_huge_directory_is_not_read_to_its_end() {
        // Promise: auto stops a scan that is far larger than the question and still answers right.
        let fs = crate::fs::sim::SimFs::new();
        let store = crate::publish::tests::sim_store(&fs).unwrap();
        fs.make_dir(&fs.root(), "v1", 0o777).unwrap();
        let dir = fs.open_dir(&fs.root(), "v1").unwrap();
        for i in 0..4000 {
            fs.create(&dir, &format!("f{i:04}"), 0o666).unwrap();
        }
        let files: Vec<String> = (3970..4040).map(|i| format!("v1/f{i:04}")).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let answers = store.probe(&files, None, false, Method::Auto);
        assert_eq!(answers.iter().filter(|answer| answer.present).count(), 30);
    }
}
