//! Opens the files of a batch, each once, within the limit on open descriptors, and holds the claims of
//! segments against them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::plan::{Need, Plan};
use super::read::Check;
use super::{Source, out_of_descriptors};
use crate::error::{Context, Error, Result};
use crate::format::{Header, TensorInfo, segment_checksum};
use crate::fs::{FileKind, Fs, split_path};
use crate::threads::{self, IO_THREADS};

/// The most directories that are held open to measure files.
const PARENTS: usize = 4;

/// A file of the batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'p> {
    pub(super) name: &'p str,
    /// Whether its header is needed, to verify.
    pub(super) header: bool,
}

/// A file that was opened and measured.
#[derive(Debug)]
pub(super) struct Opened<F: Fs> {
    /// None beyond the budget: opened again for each read.
    pub(super) file: Option<F::File>,
    pub(super) size: u64,
    pub(super) header: Option<Header>,
    /// Whether reads of it go around the page cache; then they take whole pages.
    pub(super) direct: AtomicBool,
}

/// How often, a millisecond apart, a thread looks for a descriptor that another one gave back.
const PATIENCE: u32 = 2000;

/// How many files may stay open at once: a quarter of what the process may have.
pub(super) fn budget() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
    usize::try_from(limit.clamp(4, 1024)).unwrap_or(4)
}

/// Opens, measures and, where wanted, reads the header of every file. Beyond the budget a file is only
/// measured, as far as that goes without opening it.
pub(super) fn open<F: Fs>(
    source: &Source<'_, F>,
    names: &[Wanted<'_>],
    budget: usize,
) -> Vec<Result<Opened<F>>> {
    let kept = AtomicUsize::new(0);
    let helpers = (names.len() / 8 + 1).min(IO_THREADS).min(budget);
    let parents = parents(source, names.get(budget..).unwrap_or_default());
    threads::map(names, helpers, |wanted| {
        source.go_on()?;
        let name = wanted.name;
        let (parent, last) = split_path(name);
        let opened = |file, size, header| Opened {
            file,
            size,
            header,
            direct: AtomicBool::new(false),
        };
        // One more than are kept is opened all the same: a job that opens a file again finds room for it.
        if kept.load(Ordering::Relaxed) > budget
            && !wanted.header
            && let Some(parent) = parents.get(parent)
            && let Ok(stat) = source.fs.stat(parent, last)
            && stat.kind == FileKind::File
        {
            return Ok(opened(None, stat.size, None));
        }
        let file = open_one(source, name)?;
        let size = source.fs.stat_file(&file).context("gather", name)?.size;
        let header = if wanted.header {
            Some(Header::read(source.fs, &file, name)?)
        } else {
            None
        };
        let keep = kept.fetch_add(1, Ordering::Relaxed) < budget;
        Ok(opened(keep.then_some(file), size, header))
    })
}

/// The directories of some files, where they are few.
fn parents<'p, F: Fs>(source: &Source<'_, F>, names: &[Wanted<'p>]) -> BTreeMap<&'p str, F::Dir> {
    let paths: BTreeSet<&str> = names
        .iter()
        .map(|wanted| split_path(wanted.name).0)
        .collect();
    if paths.len() > PARENTS {
        return BTreeMap::new();
    }
    let open = |path| Some((path, source.fs.open_dir(source.dir, path).ok()?));
    paths.into_iter().filter_map(open).collect()
}

/// Opens a file that was open before and not kept. There was room for one more then, which all threads of
/// the wave share; they, or others in the process, are waited for, while any of it still gets through.
pub(super) fn open_again<F: Fs>(source: &Source<'_, F>, name: &str) -> Result<F::File> {
    let mut turns = PATIENCE;
    loop {
        let opened = open_one(source, name);
        if turns == 0 || !opened.as_ref().is_err_and(out_of_descriptors) {
            return opened;
        }
        source.go_on()?;
        turns -= 1;
        thread::sleep(Duration::from_millis(1));
    }
}

/// Opens one file. What seems missing is asked for again after its directories were opened: an NFS
/// client remembers for a minute that a name did not exist.
pub(super) fn open_one<F: Fs>(source: &Source<'_, F>, name: &str) -> Result<F::File> {
    let (fs, dir) = (source.fs, source.dir);
    let opened = match fs.open(dir, name) {
        Err(Errno::NOENT | Errno::STALE) => fs
            .open_dir(dir, "")
            .and_then(|root| fs.open_dir(&root, split_path(name).0))
            .and_then(|parent| fs.open(&parent, split_path(name).1)),
        other => other,
    };
    opened.context("gather", name)
}

/// The open file of each need and what to check it against, or the first thing that is wrong.
pub(super) type Files<'a, F> = Vec<(&'a Opened<F>, Option<Check<'a>>)>;

pub(super) fn check_files<'a, 'p, F: Fs>(
    plan: &'p Plan,
    index: &HashMap<&str, usize>,
    opened: &'a [Result<Opened<F>>],
) -> Result<Files<'a, F>> {
    let mut last: Option<(&Arc<str>, usize)> = None;
    let one = |need: &'p Need| {
        let at = match last {
            Some((file, at)) if Arc::ptr_eq(file, &need.file) => at,
            _ => index[&*need.file],
        };
        last = Some((&need.file, at));
        let opened = opened[at].as_ref().map_err(Clone::clone)?;
        if need.end > opened.size {
            let (index, end, size) = (need.index, need.end, opened.size);
            let why = format!("segment {index} ends at byte {end}, but the file has {size} bytes");
            return Err(Error::corrupt("gather", &*need.file, why));
        }
        let header = opened.header.as_ref().filter(|_| !need.checksum.is_empty());
        let check = header.map(|header| find(header, need)).transpose()?;
        Ok((opened, check))
    };
    plan.needs.iter().map(one).collect()
}

/// The tensor that a segment with a checksum lies in. A file without it is not the file that was written.
fn find<'a>(header: &'a Header, need: &Need) -> Result<Check<'a>> {
    let wrong = |why: String| Err(Error::corrupt("verify", &*need.file, why));
    let index = need.index;
    let inside = |tensor: &&TensorInfo| need.end - tensor.offset <= tensor.len;
    let Some(tensor) = header.tensor_at(need.start).filter(inside) else {
        return wrong(format!("segment {index} lies in no tensor of the file"));
    };
    let name = &tensor.name;
    match header.blocks(name) {
        Some(blocks) if segment_checksum(blocks) == *need.checksum => Ok(Check { tensor, blocks }),
        Some(_) => wrong(format!(
            "tensor {name:?} is not the one that segment {index} was made of"
        )),
        None => wrong(format!(
            "tensor {name:?} has no checksum, but segment {index} has one"
        )),
    }
}
