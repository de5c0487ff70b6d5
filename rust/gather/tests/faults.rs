use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::error::Kind;
use crate::fs::{FileKind, Io, Stat};

on_each_engine!(
    short_reads_go_on,
    a_file_cut_while_it_is_read_is_corrupt,
    an_unreadable_file_fails_its_requests_alone,
    files_are_opened_once_and_few_at_a_time,
    reads_that_a_ring_cannot_do_are_done_again,
    what_refuses_a_ring_is_the_error_of_its_request,
);

/// The real filesystem, read-only and troublesome.
#[derive(Clone)]
struct Troubled {
    inner: RealFs,
    /// A read gives at most this much.
    most: usize,
    /// Files end here, whatever their size said.
    end: u64,
    /// Reads of files with this in their first byte fail.
    bad: Option<u8>,
    /// How many files may be open.
    limit: usize,
    /// What a ring reads instead, if anything.
    ring: Option<Arc<std::os::fd::OwnedFd>>,
    open: Arc<AtomicUsize>,
    opened: Arc<AtomicUsize>,
}

struct Counted {
    ring: Option<Arc<std::os::fd::OwnedFd>>,
    inner: <RealFs as Fs>::File,
    open: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Troubled {
    fn new() -> Self {
        Self {
            inner: RealFs::new(),
            most: usize::MAX,
            end: u64::MAX,
            bad: None,
            limit: usize::MAX,
            ring: None,
            open: Arc::default(),
            opened: Arc::default(),
        }
    }

    fn gather(&self, bench: &Bench, requests: Vec<Request<'_>>) -> Vec<Result<Filled>> {
        let dir = real(bench.root.path()).1;
        let (fs, dir, pool, stop) = (self, &dir, &bench.pool, &AtomicBool::new(false));
        gather(
            &Source {
                fs,
                dir,
                pool,
                stop,
                verify: false,
                engine: ENGINE.get(),
            },
            requests,
        )
    }
}

type Dir = <RealFs as Fs>::Dir;

impl Fs for Troubled {
    type Dir = Dir;
    type File = Counted;
    type Lock = ();

    fn open_dir(&self, at: &Dir, path: &str) -> Io<Dir> {
        self.inner.open_dir(at, path)
    }
    fn open(&self, at: &Dir, path: &str) -> Io<Counted> {
        let open = self.open.clone();
        if open.fetch_add(1, Ordering::SeqCst) >= self.limit {
            open.fetch_sub(1, Ordering::SeqCst);
            return Err(Errno::MFILE);
        }
        match self.inner.open(at, path) {
            Ok(inner) => {
                self.opened.fetch_add(1, Ordering::SeqCst);
                let ring = self.ring.clone();
                Ok(Counted { ring, inner, open })
            }
            Err(errno) => {
                open.fetch_sub(1, Ordering::SeqCst);
                Err(errno)
            }
        }
    }
    fn read_at(&self, file: &Counted, buf: &mut [u8], offset: u64) -> Io<usize> {
        let mut first = [0];
        self.inner.read_at(&file.inner, &mut first, 0)?;
        if Some(first[0]) == self.bad {
            return Err(Errno::IO);
        }
        let left = usize::try_from(self.end.saturating_sub(offset)).unwrap_or(usize::MAX);
        let most = buf.len().min(self.most).min(left);
        self.inner.read_at(&file.inner, &mut buf[..most], offset)
    }
    fn file_fd<'f>(&self, file: &'f Counted) -> Option<std::os::fd::BorrowedFd<'f>> {
        file.ring.as_deref().map(std::os::fd::AsFd::as_fd)
    }
    fn stat_file(&self, file: &Counted) -> Io<Stat> {
        self.inner.stat_file(&file.inner)
    }

    fn make_dir(&self, _: &Dir, _: &str, _: u32) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn remove_dir(&self, _: &Dir, _: &str) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn create(&self, _: &Dir, _: &str, _: u32) -> Io<Counted> {
        Err(Errno::ROFS)
    }
    fn set_mode(&self, _: &Dir, _: &str, _: u32) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn write_at(&self, _: &Counted, _: &[u8], _: u64) -> Io<usize> {
        Err(Errno::ROFS)
    }
    fn sync_file(&self, _: &Counted) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn sync_dir(&self, _: &Dir) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn stat(&self, _: &Dir, _: &str) -> Io<Stat> {
        Err(Errno::ROFS)
    }
    fn stat_dir(&self, _: &Dir) -> Io<Stat> {
        Err(Errno::ROFS)
    }
    fn link(&self, _: &Dir, _: &str, _: &Dir, _: &str) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn rename(&self, _: &Dir, _: &str, _: &Dir, _: &str) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn unlink(&self, _: &Dir, _: &str) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn lock(&self, _: &Dir, _: &str) -> Io<()> {
        Err(Errno::ROFS)
    }
    fn list(&self, _: &Dir, _: &mut dyn FnMut(&str, FileKind) -> ControlFlow<()>) -> Io<()> {
        Err(Errno::ROFS)
    }
}

fn short_reads_go_on() {
    // Promise: a read that moves less than asked is continued, wherever it stops.
    let bench = Bench::new();
    let bytes = Random(5).bytes(10_000);
    bench.write("v1/a", &bytes);
    for most in [1, 7, 4096] {
        let fs = Troubled {
            most,
            ..Troubled::new()
        };
        let whole = || vec![segment("v1/a", 1, 0, 999, DType::U8, &[10])];
        let plain = request(whole(), 0, 999, DType::U8, &[10]);
        let wide = request(whole(), 3, 999, DType::U16, &[10]);
        let results = fs.gather(&bench, vec![plain, wide]);
        let out = |at: usize| results[at].as_ref().unwrap().out.as_deref().unwrap();
        assert!(out(0) == &bytes[1..9991]);
        assert!(out(1).iter().step_by(2).eq(&bytes[31..9991]));
    }
}

fn a_file_cut_while_it_is_read_is_corrupt() {
    // Promise: rows are never returned in part; the end of the file tells how far it went.
    let bench = Bench::new();
    bench.write("v1/a", &[1; 1000]);
    let fs = Troubled {
        end: 600,
        ..Troubled::new()
    };
    let ask = |rows| {
        request(
            vec![segment("v1/a", 0, 0, rows, DType::U8, &[])],
            0,
            rows,
            DType::U8,
            &[],
        )
    };
    let results = fs.gather(&bench, vec![ask(600), ask(601)]);
    assert!(results[0].is_ok());
    let error = results[1].as_ref().unwrap_err();
    assert!(
        matches!(&error.kind, Kind::Corrupt(why) if why.contains("byte 600")),
        "{error}"
    );
}

fn an_unreadable_file_fails_its_requests_alone() {
    // Promise: EIO comes out as EIO, naming the file, and only where that file was needed.
    let bench = Bench::new();
    bench.write("v1/good", &[1; 100]);
    bench.write("v1/bad", &[2; 100]);
    let fs = Troubled {
        bad: Some(2),
        ..Troubled::new()
    };
    let part = |file: &str, pos| segment(file, 0, pos, 50, DType::U8, &[]);
    let batch = [
        vec!["v1/good"],
        vec!["v1/good", "v1/bad"],
        vec!["v1/bad"],
        vec!["v1/good"],
    ];
    let batch = batch.map(|files| {
        let segments = files
            .iter()
            .zip([0, 50])
            .map(|(file, pos)| part(file, pos))
            .collect();
        request(segments, 0, 100, DType::U8, &[])
    });
    let results = fs.gather(&bench, batch.into());
    let failed: Vec<_> = results
        .iter()
        .map(|r| r.as_ref().err().map(|e| (e.errno(), e.path.clone())))
        .collect();
    let bad = Some((Some(Errno::IO), "v1/bad".to_string()));
    assert_eq!(failed, [None, bad.clone(), bad, None]);
}

fn files_are_opened_once_and_few_at_a_time() {
    // Promise: field after field of the same files opens each once; EMFILE makes the batch smaller,
    // not fail.
    let bench = Bench::new();
    let names: Vec<String> = (0..60).map(|i| format!("v1/f{i}")).collect();
    for name in &names {
        bench.write(name, name.as_bytes());
    }
    let ask = |name: &String| {
        request(
            vec![segment(name, 0, 0, 4, DType::U8, &[])],
            0,
            4,
            DType::U8,
            &[],
        )
    };
    let batch = || -> Vec<_> {
        names
            .iter()
            .chain(&names)
            .chain(names.iter().rev())
            .map(ask)
            .collect()
    };
    let all = |results: Vec<Result<Filled>>| {
        results.iter().all(|r| {
            r.as_ref()
                .unwrap()
                .out
                .as_deref()
                .unwrap()
                .chunks(4)
                .all(|four| four == b"v1/f")
        })
    };
    let fs = Troubled::new();
    assert!(all(fs.gather(&bench, batch())));
    assert_eq!(fs.opened.load(Ordering::SeqCst), 60);
    for limit in [2, 5] {
        let fs = Troubled {
            limit,
            ..Troubled::new()
        };
        assert!(all(fs.gather(&bench, batch())));
        // Once each, and what was open when the limit was met.
        assert!(fs.opened.load(Ordering::SeqCst) < 150);
        let every = names
            .iter()
            .zip(0..)
            .map(|(name, i)| segment(name, 0, 4 * i, 4, DType::U8, &[]));
        let one = request(every.collect(), 0, 240, DType::U8, &[]);
        assert!(all(fs.gather(&bench, vec![one])));
        assert_eq!(fs.open.load(Ordering::SeqCst), 0);
    }
}

/// Rows of "v1/a" as every engine but a ring sees them, and what a ring is given instead.
fn behind(bench: &Bench, bytes: &[u8], ring: std::os::fd::OwnedFd) -> Result<Filled> {
    bench.write("v1/a", bytes);
    let fs = Troubled {
        ring: Some(Arc::new(ring)),
        ..Troubled::new()
    };
    let rows = bytes.len() as u64;
    let whole = vec![segment("v1/a", 0, 0, rows, DType::U8, &[])];
    let batch = vec![request(whole, 0, rows, DType::U8, &[])];
    fs.gather(bench, batch).pop().unwrap()
}

fn reads_that_a_ring_cannot_do_are_done_again() {
    // Promise: where a ring meets the end of a file early, plain reads have the last word.
    let bench = Bench::new();
    let bytes = Random(9).bytes(3_000_000);
    let empty = tempfile::tempfile().unwrap().into();
    let filled = behind(&bench, &bytes, empty).unwrap();
    assert!(filled.out.as_deref().unwrap() == bytes);
}

fn what_refuses_a_ring_is_the_error_of_its_request() {
    // Promise: any other errno comes out as it is, with the name of the file.
    let bench = Bench::new();
    let directory = std::fs::File::open(bench.root.path()).unwrap().into();
    let result = behind(&bench, &[1; 5000], directory);
    if ENGINE.get() == Engine::Uring {
        let error = result.unwrap_err();
        assert_eq!(
            (error.errno(), error.path.as_str()),
            (Some(Errno::ISDIR), "v1/a")
        );
    } else {
        assert!(result.is_ok());
    }
}
