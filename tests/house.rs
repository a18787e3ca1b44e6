//! Rules of the project that Cargo does not check, checked against the sources: what a plan may not use, among others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Side effects that a plan may not use: the cluster, the runtime, the clock, the environment, randomness.
const IMPURE_PATHS: [&str; 13] = [
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
    " rand::",
    "kruise_ops",
];

struct SourceFile {
    /// Path relative to the repository.
    name: String,
    text: String,
}

fn repo_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files of that extension at and below these paths, relative to the repository.
fn files_with_extension(places: &[&str], extension: &str) -> Vec<SourceFile> {
    let root = &repo_root();
    let mut pending: Vec<PathBuf> = places.iter().map(|place| root.join(place)).collect();
    let mut found = Vec::new();
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|e| e == extension) {
            let name = path.strip_prefix(root).unwrap().display().to_string();
            found.push(SourceFile {
                name,
                text: fs::read_to_string(&path).unwrap(),
            });
        }
    }
    found
}

fn sources(folder: &str) -> Vec<SourceFile> {
    let found = files_with_extension(&[folder], "rs");
    assert!(!found.is_empty(), "there are no sources in {folder}");
    found
}

/// Sources of the product, without test files.
fn product_sources() -> impl Iterator<Item = SourceFile> {
    let is_test = |name: &str| name.contains("/tests") || name.ends_with("malformed.rs");
    sources("src")
        .into_iter()
        .filter(move |source| !is_test(&source.name))
}

/// Lines of code, without comments and without the tests at the end of the file.
fn code_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .take_while(|l| !l.trim().ends_with("mod tests {"))
        .filter(|l| !l.trim_start().starts_with("//"))
}

fn assert_no_offences(what: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{what}:\n{}", offences.join("\n"));
}

/// Folders of `src/` with a manifest.
fn crate_folders() -> Vec<String> {
    let src = repo_root().join("src");
    let folders = fs::read_dir(src).unwrap().map(|entry| entry.unwrap().path());
    let crates = folders.filter(|path| path.join("Cargo.toml").exists());
    crates
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn architecture_page_shows_every_crate() {
    let architecture = repo_root().join("docs/development/architecture.md");
    let architecture = fs::read_to_string(architecture).unwrap();
    let mut crates = crate_folders();
    crates.retain(|name| !architecture.contains(&format!("{name}[\"{name}/")));
    assert_no_offences("docs/development/architecture.md does not draw", &crates);
}

/// A crate without a client and a runtime in its manifest can neither send requests nor wait.
#[test]
fn pure_crates_have_no_client_or_runtime_dependency() {
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
        let manifest = repo_root().join(format!("src/{name}/Cargo.toml"));
        let manifest = fs::read_to_string(manifest).unwrap();
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap();
        let dependencies = dependencies.split("[dev-dependencies]").next().unwrap();
        for dependency in impure {
            let has_dependency = dependencies
                .lines()
                .any(|line| line.starts_with(dependency) || line.contains(&format!("\"{dependency}\"")));
            assert!(!has_dependency, "{name} depends on {dependency}");
        }
    }
}

#[test]
fn plans_are_pure() {
    let plan = |name: &str| {
        let parts = ["plan", "plan.rs", "workload"];
        name.split('/').any(|part| parts.contains(&part)) && !name.contains("tests")
    };
    let plans: Vec<SourceFile> = sources("src").into_iter().filter(|s| plan(&s.name)).collect();
    assert!(plans.len() >= 5, "the duties' plans were not found");
    let mut offences = Vec::new();
    for source in &plans {
        for line in code_lines(&source.text) {
            // Of the outer crates, only names.
            let uses_cluster = line.contains("kruise_cluster") && !line.contains("kruise_cluster::Key;");
            let uses_cri = line.contains("kruise_cri");
            if uses_cluster || uses_cri || IMPURE_PATHS.iter().any(|word| line.contains(word)) {
                offences.push(format!("{}: {}", source.name, line.trim()));
            }
        }
    }
    assert_no_offences("a plan is given everything it knows", &offences);
}

/// `value["field"] = …` panics if `value` is a string, a number or a list, and external input may be any of them:
/// `api::json::set` and `get_mut` do not panic.
#[test]
fn json_is_not_written_by_index() {
    let index = |line: &str| {
        line.split('[')
            .skip(1)
            .any(|suffix| suffix.starts_with('"') || suffix.starts_with("keys::"))
    };
    let assigned = |line: &str| {
        let (left, _) = line.split_once("] = ").or_else(|| line.split_once("].take()"))?;
        Some(left.rsplit([';', '{']).next().unwrap_or(left).to_owned())
    };
    let mut offences = Vec::new();
    for source in product_sources() {
        let offends = |line: &&str| {
            assigned(line).is_some_and(|left| index(&left))
                || line.split("&mut ").skip(1).any(|suffix| {
                    let place = suffix.split([',', ';', ')', ' ']).next().unwrap_or(suffix);
                    index(place)
                })
        };
        let found = code_lines(&source.text).filter(offends);
        offences.extend(found.map(|line| format!("{}: {}", source.name, line.trim())));
    }
    assert_no_offences("JSON is written by index", &offences);
}

/// Texts in the pages for operators that other programs write, or that contain values.
const QUOTES_NOT_IN_SOURCES: [&str; 3] = [
    "Address already in use",
    "attempt 1 of …",
    "image pull: pulling nginx:1 has been running for 700 s (limit 600 s)",
];

/// A user who searches the log for a text quoted on a page must find it.
#[test]
fn texts_quoted_in_operator_docs_exist_in_sources() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let code: Vec<String> = sources("src")
        .iter()
        // A string whose line ends with a backslash continues with the first word of the next line.
        .map(|source| {
            words(
                &code_lines(&source.text)
                    .collect::<Vec<_>>()
                    .join("\n")
                    .replace("\\\n", ""),
            )
        })
        .collect();
    let programs = ["kubectl ", "crictl ", "kruise-daemon ", "-"];
    let is_text =
        |quote: &String| quote.contains(' ') && !programs.iter().any(|name| quote.starts_with(name));
    let mut missing = Vec::new();
    for page in [
        "docs/operations/operations.md",
        "docs/operations/runbooks.md",
        "docs/user/recreate.md",
    ] {
        let text = fs::read_to_string(repo_root().join(page)).unwrap();
        // Every second part is a code block, and in the others every second part is a quotation.
        let prose: String = text.split("```").step_by(2).collect();
        let quotes = prose.split('`').skip(1).step_by(2).map(words).filter(is_text);
        for quote in quotes.filter(|quote| !QUOTES_NOT_IN_SOURCES.contains(&quote.as_str())) {
            let mut parts = quote.split('…').map(|part| part.trim_matches([' ', ':']));
            if !parts.all(|part| code.iter().any(|code| code.contains(part))) {
                missing.push(format!("{page}: {quote}"));
            }
        }
    }
    assert_no_offences("no program says", &missing);
}

/// Pages of the repository.
fn doc_pages() -> Vec<SourceFile> {
    let places = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "docs",
        "deploy",
    ];
    let pages = files_with_extension(&places, "md");
    assert!(pages.len() > 20, "only {} pages were found", pages.len());
    pages
}

/// Anchor of a heading in links: lower case, without punctuation, dashes for spaces.
fn heading_anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn doc_links_resolve() {
    let mut broken = Vec::new();
    for SourceFile { name, text } in doc_pages() {
        let page = repo_root().join(&name);
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|suffix| suffix.split(')').next())
        {
            if link.contains("://") {
                continue;
            }
            let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => page.clone(),
                path => page.parent().unwrap().join(path),
            };
            let resolves = target.exists()
                && (fragment.is_empty() || {
                    let text = fs::read_to_string(&target).unwrap();
                    text.lines()
                        .any(|line| line.starts_with('#') && heading_anchor(line) == fragment)
                });
            if !resolves {
                broken.push(format!("{name}: {link}"));
            }
        }
    }
    assert_no_offences("these links lead nowhere", &broken);
}

/// Source files that pages mention in code spans, by the end of their path, with or without the `src` of a crate.
#[test]
fn docs_mention_existing_source_files() {
    let files: Vec<String> = ["src", "tests", "testbed", "xtask", "benches"]
        .into_iter()
        .flat_map(sources)
        .flat_map(|source| [source.name.replace("/src/", "/"), source.name])
        .map(|name| format!("/{name}"))
        .collect();
    let mut missing = Vec::new();
    for SourceFile { name, text } in doc_pages() {
        let prose: String = text.split("```").step_by(2).collect();
        let spans = prose.split('`').skip(1).step_by(2);
        for span in spans.filter(|span| span.ends_with(".rs") && !span.contains(' ')) {
            if !files.iter().any(|file| file.ends_with(&format!("/{span}"))) {
                missing.push(format!("{name}: {span}"));
            }
        }
    }
    assert_no_offences("no such source file", &missing);
}

/// Whether a line defines something of that name.
fn is_definition(line: &str, name: &str) -> bool {
    let tokens = line.split(|c: char| !c.is_alphanumeric() && c != '_');
    let tokens: Vec<&str> = tokens.collect();
    tokens
        .windows(2)
        .any(|pair| ["fn", "struct", "enum", "const", "static"].contains(&pair[0]) && pair[1] == name)
}

#[test]
fn steps_of_two_ways_name_what_their_files_define() {
    let page = repo_root().join("docs/development/two-ways.md");
    let text = fs::read_to_string(&page).unwrap();
    let (mut missing, mut steps) = (Vec::new(), 0);
    for line in text.lines().filter(|line| line.starts_with(char::is_numeric)) {
        let Some((step, link)) = line.split_once("](") else {
            continue;
        };
        let file = page.parent().unwrap().join(link.trim_end_matches(')'));
        let source = fs::read_to_string(file).unwrap();
        for name in step.split('`').skip(1).step_by(2) {
            let name = name.rsplit("::").next().unwrap();
            if !code_lines(&source).any(|line| is_definition(line, name)) {
                missing.push(format!("{name}: {step}"));
            }
        }
        steps += 1;
    }
    assert!(steps > 60, "{steps}");
    assert_no_offences("docs/development/two-ways.md names", &missing);
}

/// Words that neither Kubernetes nor its users use in this way.
const UNUSUAL_WORDS: [&str; 8] = [
    "told",
    "anew",
    "somebody",
    "nobody",
    "whoever",
    "besides",
    "is to be",
    "are to be",
];

/// Whether a text contains one of [`UNUSUAL_WORDS`], which may be several words.
fn has_unusual_words(text: &str) -> bool {
    let spaced = format!(" {} ", text.replace(|c: char| !c.is_alphanumeric(), " "));
    UNUSUAL_WORDS
        .iter()
        .any(|word| spaced.contains(&format!(" {word} ")))
}

/// The string literals in a line of code.
fn string_literals(line: &str) -> impl Iterator<Item = &str> {
    line.split('"').skip(1).step_by(2)
}

/// Events, conditions, messages, logs, help: what users read.
#[test]
fn user_facing_texts_use_plain_words() {
    let mut offences = Vec::new();
    for source in product_sources() {
        for line in code_lines(&source.text) {
            if string_literals(line).any(has_unusual_words) {
                offences.push(format!("{}: {}", source.name, line.trim()));
            }
        }
    }
    assert_no_offences("say it as kubelet and kubectl would", &offences);
}

/// The name of a type, constant, function or variable in lower case, with underscores between its words.
fn snake_case(name: &str) -> String {
    let camel = name.chars().any(char::is_lowercase);
    let mut snake = String::new();
    for letter in name.chars() {
        if camel && letter.is_uppercase() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

/// Words of [`UNUSUAL_WORDS`], and some more that say less than a term of the glossary, for names and comments.
#[test]
fn names_and_comments_use_terms_of_the_glossary() {
    let vague = ["tell", "say", "said", "wish", "stray", "doubt", "asked"];
    let mut offences = Vec::new();
    let folders = ["src", "tests", "testbed", "xtask", "benches"];
    for source in folders
        .into_iter()
        .flat_map(sources)
        .filter(|source| source.name != "tests/house.rs")
    {
        for line in source.text.lines() {
            let tokens = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            let tokens: Vec<&str> = tokens.filter(|token| *token != "mut").collect();
            let defined = tokens
                .windows(2)
                .filter(|pair| {
                    [
                        "fn", "struct", "enum", "trait", "type", "const", "static", "mod", "let",
                    ]
                    .contains(&pair[0])
                })
                .map(|pair| pair[1]);
            let named = defined.map(snake_case).any(|name| {
                let mut words = vague.iter().chain(&UNUSUAL_WORDS);
                words.any(|word| name.split('_').any(|part| part == *word))
            });
            let comment = line.trim_start().starts_with("//")
                && UNUSUAL_WORDS[..5].iter().any(|word| tokens.contains(word));
            // Users read these as the descriptions of fields in the CRDs.
            let description = source.name.starts_with("src/api/")
                && line.trim_start().starts_with("///")
                && has_unusual_words(line);
            if named || comment || description {
                offences.push(format!("{}: {}", source.name, line.trim()));
            }
        }
    }
    assert_no_offences("use the terms of docs/development/glossary.md", &offences);
}

/// Admission depends on no controller: it also runs in a process of its own.
#[test]
fn admission_imports_no_controller() {
    let mut offences = Vec::new();
    for source in sources("src/manager/src/admission") {
        let other = |line: &&str| line.contains("crate::") && !line.contains("crate::admission");
        let lines = code_lines(&source.text).filter(other);
        offences.extend(lines.map(|line| format!("{}: {}", source.name, line.trim())));
    }
    assert_no_offences("admission knows", &offences);
}

/// What a file of the products imports.
struct Module {
    /// Path of the file, relative to the repository.
    file: String,
    /// The paths of its `use` declarations, by the names that they introduce.
    names: BTreeMap<String, Vec<String>>,
    /// All paths in its code.
    paths: Vec<Vec<String>>,
}

/// The modules of the products, by the folders of their crates and their paths in these.
type Modules = BTreeMap<Vec<String>, Module>;

fn path_parts(path: &str) -> Vec<String> {
    let parts = path.split("::").map(str::trim);
    parts.filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Adds the names that a tree of a `use` declaration introduces, and their paths.
fn add_names(tree: &str, prefix: &[String], names: &mut BTreeMap<String, Vec<String>>) {
    let tree = tree.trim();
    if let Some((path, list)) = tree.strip_suffix('}').and_then(|tree| tree.split_once('{')) {
        let prefix = [prefix, path_parts(path).as_slice()].concat();
        let mut depth = 0_i32;
        let is_separator = |letter: char| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            letter == ',' && depth == 0
        };
        for item in list.split(is_separator).filter(|item| !item.trim().is_empty()) {
            add_names(item, &prefix, names);
        }
        return;
    }
    let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
    let mut path = [prefix, path_parts(path).as_slice()].concat();
    path.pop_if(|last| last == "self");
    let name = match alias {
        "" => path.last().cloned().unwrap_or_default(),
        alias => alias.trim().to_owned(),
    };
    names.insert(name, path);
}

fn modules() -> Modules {
    let mut sources: Vec<SourceFile> = product_sources().collect();
    // The library of a crate comes after its program, and replaces it.
    sources.sort_by(|one, other| other.name.cmp(&one.name));
    let mut modules = Modules::new();
    for SourceFile { name: file, text } in sources {
        let crate_file = file
            .strip_prefix("src/")
            .and_then(|file| file.split_once("/src/"));
        let Some((folder, name)) = crate_file else {
            continue;
        };
        let mut path = vec![folder.to_owned()];
        path.extend(name.trim_end_matches(".rs").split('/').map(str::to_owned));
        path.pop_if(|last| ["lib", "main", "mod"].contains(&last.as_str()));
        let mut names = BTreeMap::new();
        let mut lines = code_lines(&text).map(str::trim);
        while let Some(line) = lines.next() {
            let declaration = line.split_once("use ");
            let is_public = |before: &str| before.starts_with("pub") && before.ends_with(' ');
            let Some((_, tree)) = declaration.filter(|(before, _)| before.is_empty() || is_public(before))
            else {
                continue;
            };
            let mut tree = tree.to_owned();
            while !tree.ends_with(';') {
                tree.push_str(lines.next().unwrap_or(";"));
            }
            add_names(tree.trim_end_matches(';'), &[], &mut names);
        }
        let code: Vec<&str> = code_lines(&text).collect();
        let code = code.join("\n");
        let words = code.split(|letter: char| !letter.is_alphanumeric() && !['_', ':'].contains(&letter));
        let paths = words.filter(|word| word.contains("::")).map(path_parts);
        let paths = paths.chain(names.values().cloned()).collect();
        modules.insert(path, Module { file, names, paths });
    }
    modules
}

/// The file with what a path of a module names; none for a module itself.
fn resolve<'a>(modules: &'a Modules, module: &[String], path: &[String]) -> Option<&'a str> {
    let mut at = module.to_vec();
    for (index, name) in path.iter().enumerate() {
        let mut child = at.clone();
        child.push(name.clone());
        let root = name.strip_prefix("kruise_").map(|folder| vec![folder.to_owned()]);
        match name.as_str() {
            "crate" => at.truncate(1),
            "self" => {}
            "super" => drop(at.pop()),
            _ if modules.contains_key(&child) => at = child,
            _ => match root.filter(|root| modules.contains_key(root)) {
                Some(root) => at = root,
                None => {
                    let here = modules.get(&at)?;
                    // What another file defines may be imported here to be imported from here.
                    return match here.names.get(name).filter(|target| target.first() != Some(name)) {
                        Some(target) => {
                            resolve(modules, &at, &[target.as_slice(), &path[index + 1..]].concat())
                        }
                        None => Some(here.file.as_str()),
                    };
                }
            },
        }
    }
    None
}

/// The files that each file of the products imports.
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    let modules = modules();
    let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, module) in &modules {
        let files = module
            .paths
            .iter()
            .filter_map(|target| resolve(&modules, path, target));
        let others = files.filter(|file| *file != module.file).map(str::to_owned);
        imports.insert(module.file.clone(), others.collect());
    }
    let imported = &imports["src/cluster/src/lease/standby.rs"];
    assert!(
        imported.contains("src/cluster/src/error.rs"),
        "it imports `crate::Error`: {imported:?}"
    );
    imports
}

/// The files that a file imports, that these import, and so on.
fn files_below<'a>(file: &'a str, imports: &'a BTreeMap<String, BTreeSet<String>>) -> BTreeSet<&'a str> {
    let (mut found, mut pending) = (BTreeSet::new(), vec![file]);
    while let Some(file) = pending.pop() {
        for imported in imports.get(file).into_iter().flatten() {
            if found.insert(imported.as_str()) {
                pending.push(imported.as_str());
            }
        }
    }
    found
}

/// A file stands on the files that it imports, and none of these on it.
#[test]
fn files_do_not_import_each_other() {
    let imports = imports();
    let below: BTreeMap<&str, BTreeSet<&str>> = imports
        .keys()
        .map(|file| (file.as_str(), files_below(file, &imports)))
        .collect();
    let mut circles = Vec::new();
    for (file, imported) in &imports {
        let above = imported
            .iter()
            .filter(|other| below[other.as_str()].contains(file.as_str()));
        circles.extend(above.map(|other| format!("{file} imports {other}")));
    }
    assert_no_offences("these imports form circles", &circles);
}

/// What several duties decide in the same way is in `api` or `workload`. The files between the folders of the duties are
/// for all of them; `fuzzing.rs` feeds their plans.
#[test]
fn duties_do_not_import_plans_of_others() {
    fn duty_and_file(name: &str) -> Option<(&str, &str)> {
        let name = name.strip_prefix("src/manager/src/")?;
        Some(name.split_once('/').unwrap_or((name, "")))
    }
    let mut offences = Vec::new();
    for (file, imported) in imports() {
        let duty = duty_and_file(&file).filter(|(duty, _)| *duty != "fuzzing.rs");
        let Some((duty, _)) = duty else {
            continue;
        };
        let is_plan_of_other = |other: &&String| {
            duty_and_file(other).is_some_and(|(other, file)| other != duty && file.starts_with("plan"))
        };
        let plans = imported.iter().filter(is_plan_of_other);
        offences.extend(plans.map(|plan| format!("{file} imports {plan}")));
    }
    assert_no_offences("plans belong to their duties", &offences);
}

/// Cases that failed once are stored next to the crate, under the path of their source file.
#[test]
fn proptest_regressions_belong_to_source_files() {
    let mut found = 0;
    for name in crate_folders() {
        let cases = format!("src/{name}/proptest-regressions");
        if !repo_root().join(&cases).exists() {
            continue;
        }
        for case in files_with_extension(&[&cases], "txt") {
            let source_path = Path::new(&case.name)
                .strip_prefix(&cases)
                .unwrap()
                .with_extension("rs");
            assert!(
                repo_root()
                    .join(format!("src/{name}/src"))
                    .join(source_path)
                    .exists(),
                "{} is of no file",
                case.name
            );
            found += 1;
        }
    }
    assert!(found > 0 && !repo_root().join("proptest-regressions").exists());
}
