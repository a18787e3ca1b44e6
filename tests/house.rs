//! The rules of the house, held against the sources: who may know whom, and what a plan may not touch.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

/// The rooms of the package of the programs, and those of it that each may know. The crates beside them Cargo keeps apart.
const ROOMS: [(&str, &[&str]); 3] = [("node", &[]), ("manager", &["admission"]), ("admission", &[])];

/// What only one of them knows: what it is, and who.
const ONE_KNOWS: [(&str, &str); 1] = [("cri", "node")];

/// What reaches out of a plan: the cluster, the runtime, the clock, the environment, chance.
const OUTSIDE: [&str; 13] = [
    "kube::Client",
    "kube::Api",
    "kube::api",
    "kube::runtime",
    "tonic::",
    "tokio::",
    "std::env",
    "std::fs",
    "SystemTime",
    "Instant::now",
    "Timestamp::now",
    "rand::",
    "crate::ops",
];

struct Source {
    /// Path below the repository.
    name: String,
    text: String,
}

fn sources(folder: &str) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut open: Vec<PathBuf> = vec![root.join(folder)];
    let mut found = Vec::new();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|e| e == "rs") {
            let name = path.strip_prefix(root).unwrap().display().to_string();
            found.push(Source {
                name,
                text: fs::read_to_string(&path).unwrap(),
            });
        }
    }
    assert!(!found.is_empty(), "there are no sources in {folder}");
    found
}

/// Lines of code, without comments and without the tests at the end of the file.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .take_while(|l| l.trim() != "mod tests {")
        .filter(|l| !l.trim_start().starts_with("//"))
}

fn report(what: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{what}:\n{}", offences.join("\n"));
}

/// Folders of `src/` with a manifest.
fn crates() -> Vec<String> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let folders = fs::read_dir(src).unwrap().map(|entry| entry.unwrap().path());
    let crates = folders.filter(|path| path.join("Cargo.toml").exists());
    crates
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn rooms_know_only_whom_they_may() {
    let (crates, mut offences) = (crates(), Vec::new());
    for source in sources("src") {
        let room = source.name.split('/').nth(1).unwrap();
        if crates.iter().any(|name| name == room) {
            continue;
        }
        let Some((_, known)) = ROOMS.iter().find(|(name, _)| *name == room) else {
            assert!(
                ["bin", "lib.rs", "fuzzing.rs"].contains(&room),
                "{room} is a new room: say here whom it may know"
            );
            continue;
        };
        let unknown = ROOMS.iter().map(|(other, _)| *other);
        let unknown = unknown.filter(|other| *other != room && !known.contains(other));
        let others = ONE_KNOWS
            .iter()
            .filter(|(_, who)| *who != room)
            .map(|(other, _)| *other);
        for other in unknown.chain(others) {
            let mentions = [format!("crate::{other}::"), format!("kruise_{other}::")];
            let lines = code(&source.text).filter(|l| mentions.iter().any(|mention| l.contains(mention)));
            offences.extend(lines.map(|l| format!("{}: {}", source.name, l.trim())));
        }
    }
    report("these arrows are not in the design", &offences);
}

#[test]
fn the_house_is_drawn_as_it_stands() {
    let drawing = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    let drawing = fs::read_to_string(drawing).unwrap();
    let (crates, rooms) = (crates(), ROOMS.map(|(room, _)| room.to_owned()));
    let all = crates.iter().chain(&rooms);
    let missing = all.filter(|room| !drawing.contains(&format!("{room}[\"{room}/")));
    report(
        "docs/architecture.md does not draw",
        &missing.cloned().collect::<Vec<_>>(),
    );
}

/// What has no client and no runtime in its manifest can neither ask nor wait.
#[test]
fn pure_crates_depend_on_no_client_and_no_runtime() {
    let impure = [
        "tokio",
        "tonic",
        "hyper",
        "kruise-cluster",
        "kruise-cri",
        "kruise-ops",
        "client",
    ];
    for name in ["api", "workload"] {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/{name}/Cargo.toml"));
        let manifest = fs::read_to_string(manifest).unwrap();
        let needed = manifest.split("[dependencies]").nth(1).unwrap();
        let needed = needed.split("[dev-dependencies]").next().unwrap();
        for dependency in impure {
            let named = needed
                .lines()
                .any(|line| line.starts_with(dependency) || line.contains(&format!("\"{dependency}\"")));
            assert!(!named, "{name} depends on {dependency}");
        }
    }
}

#[test]
fn plans_are_pure() {
    let plan = |name: &str| {
        let parts = ["plan", "plan.rs", "workload"];
        name.split('/').any(|part| parts.contains(&part)) && !name.contains("tests")
    };
    let plans: Vec<Source> = sources("src").into_iter().filter(|s| plan(&s.name)).collect();
    assert!(plans.len() >= 5, "the duties' plans were not found");
    let mut offences = Vec::new();
    for source in &plans {
        for line in code(&source.text) {
            // Of the outer rooms, only what names things.
            let room = line.contains("crate::cluster") && !line.contains("crate::cluster::Key;");
            let runtime = line.contains("crate::cri");
            if room || runtime || OUTSIDE.iter().any(|word| line.contains(word)) {
                offences.push(format!("{}: {}", source.name, line.trim()));
            }
        }
    }
    report("a plan is given everything it knows", &offences);
}

/// `value["field"] = …` panics where `value` is a string, a number or a list, and what comes from outside may be any of them:
/// `api::json::set` and `get_mut` do not.
#[test]
fn json_is_not_written_by_index() {
    let index = |line: &str| {
        line.split('[')
            .skip(1)
            .any(|rest| rest.starts_with('"') || rest.starts_with("keys::"))
    };
    let assigned = |line: &str| {
        let (left, _) = line.split_once("] = ").or_else(|| line.split_once("].take()"))?;
        Some(left.rsplit([';', '{']).next().unwrap_or(left).to_owned())
    };
    let mut offences = Vec::new();
    let is_test = |name: &str| name.contains("/tests") || name.ends_with("hostile.rs");
    for source in sources("src").into_iter().filter(|source| !is_test(&source.name)) {
        let offends = |line: &&str| {
            assigned(line).is_some_and(|left| index(&left))
                || line.split("&mut ").skip(1).any(|rest| {
                    let place = rest.split([',', ';', ')', ' ']).next().unwrap_or(rest);
                    index(place)
                })
        };
        let found = code(&source.text).filter(offends);
        offences.extend(found.map(|line| format!("{}: {}", source.name, line.trim())));
    }
    report("JSON is written by index", &offences);
}

/// Texts in the pages for operators that other programs write, or that have values in them.
const NOT_IN_THE_SOURCES: [&str; 3] = [
    "Address already in use",
    "attempt 1 of …",
    "image pull: pulling nginx:1 takes 700 s already, and by its own limits 600 s at most",
];

/// Whoever searches the log for what a page quotes must find it.
#[test]
fn texts_that_the_pages_for_operators_quote_are_in_the_sources() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let code: Vec<String> = sources("src")
        .iter()
        // A text whose line ends with a backslash goes on with the first word of the next line.
        .map(|source| {
            words(
                &code(&source.text)
                    .collect::<Vec<_>>()
                    .join("\n")
                    .replace("\\\n", ""),
            )
        })
        .collect();
    let programs = ["kubectl ", "kruise-daemon ", "-", "time()"];
    let is_text =
        |quote: &String| quote.contains(' ') && !programs.iter().any(|name| quote.starts_with(name));
    let mut missing = Vec::new();
    for page in ["docs/operations.md", "docs/recreate.md"] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).unwrap();
        // Every second part is a block of code, and of the others every second one a quotation.
        let prose: String = text.split("```").step_by(2).collect();
        let quotes = prose.split('`').skip(1).step_by(2).map(words).filter(is_text);
        for quote in quotes.filter(|quote| !NOT_IN_THE_SOURCES.contains(&quote.as_str())) {
            let mut parts = quote.split('…').map(|part| part.trim_matches([' ', ':']));
            if !parts.all(|part| code.iter().any(|code| code.contains(part))) {
                missing.push(format!("{page}: {quote}"));
            }
        }
    }
    report("no program says", &missing);
}
