//! Records of injected sets in the Pod's annotations, in CEL, which cannot parse JSON: regular expressions split what
//! [`crate::sidecarset::recorded`] writes into the entries of single sets.

use kruise_api::cel::string;

/// Characters of an annotation that are read: the time for a regular expression is limited.
pub(super) const MAX_TEXT: usize = 16_384;
/// A JSON string.
const TEXT: &str = r#""(?:[^"\\]|\\.)*""#;
/// The beginning of a record that a policy wrote; entries that admission found in the Pod mostly have a time.
const WITHOUT_TIME: &str = r#":{"updateTimestamp":null,"#;
/// The beginning of a record without a time.
const ABSENT_TIME: &str = r#":{"hash":"#;

fn map_of(entry: &str) -> String {
    format!(r"^\{{(?:{entry}(?:,{entry})*)?\}}$")
}

/// The entries of a map with this form.
fn entries(key: &str, entry: &str) -> String {
    let text = format!("variables.annotations[?{}].orValue('')", string(key));
    format!(
        "{text}.size() <= {MAX_TEXT} && {text}.matches({}) ? {text}.findAll({}) : []",
        string(&map_of(entry)),
        string(entry)
    )
}

/// The entries of an annotation with [`crate::sidecarset::recorded::HashRecords`].
pub(super) fn hash_records(key: &str) -> String {
    let list = format!(r"(?:null|\[(?:{TEXT}(?:,{TEXT})*)?\])");
    let record = format!(
        r#"\{{(?:"updateTimestamp":(?:null|{TEXT}),)?"hash":{TEXT},"sidecarSetName":{TEXT},"sidecarList":{list}(?:,"controllerRevision":{TEXT})?\}}"#
    );
    entries(key, &format!("{TEXT}:(?:{TEXT}|{record})"))
}

/// These entries as they are written: plain hashes become records.
pub(super) fn as_written(entries: &str) -> String {
    let legacy = string(&format!("^{TEXT}:{TEXT}$"));
    let name = format!("e.find({})", string(&format!("^{TEXT}")));
    let hash = format!("e.substring({name}.size() + 1)");
    let [begin, middle, end] = [
        format!("{WITHOUT_TIME}\"hash\":"),
        r#","sidecarSetName":"#.to_owned(),
        r#","sidecarList":null}"#.to_owned(),
    ]
    .map(|text| string(&text));
    let with_time = string(&format!("{WITHOUT_TIME}\"hash\":"));
    format!(
        "{entries}.map(e, e.matches({legacy}) ? {name} + {begin} + {hash} + {middle} + {name} + {end} : e.replace({}, {with_time}))",
        string(ABSENT_TIME)
    )
}

/// Those of these entries that policies wrote before this one.
pub(super) fn by_policies(entries: &str) -> String {
    format!("{entries}.filter(e, e.contains({}))", string(WITHOUT_TIME))
}

/// The entries of an annotation with [`crate::sidecarset::recorded::WorkingContainers`].
pub(super) fn working(key: &str) -> String {
    entries(key, &format!("{TEXT}:{TEXT}"))
}

/// The map of these entries and new ones, each as text, sorted. An entry of the same name is replaced.
pub(super) fn map_with(entries: &str, new: &[(String, String)]) -> String {
    let names: Vec<String> = new
        .iter()
        .map(|(name, _)| format!("!e.startsWith({})", string(&format!("{}:", json_text(name)))))
        .collect();
    let texts: Vec<String> = new
        .iter()
        .map(|(name, value)| string(&format!("{}:{value}", json_text(name))))
        .collect();
    format!(
        "'{{' + ({entries}.filter(e, {}) + [{}]).sort().join(',') + '}}'",
        names.join(" && "),
        texts.join(", ")
    )
}

fn json_text(text: &str) -> String {
    kruise_api::go_json::to_json(&text)
}

/// Whether an entry is of one of these sets.
pub(super) fn is_of(entry: &str, sets: &[&str]) -> String {
    let sets: Vec<String> = sets.iter().map(|name| format!("{}:", json_text(name))).collect();
    let sets = kruise_api::cel::strings(sets.iter().map(String::as_str));
    format!("{sets}.exists(n, {entry}.startsWith(n))")
}

/// Whether the name of an entry's set is less than `set`.
pub(super) fn is_before(entry: &str, set: &str) -> String {
    format!("{entry} < {}", string(&format!("{}:", json_text(set))))
}

/// The names of the containers that entries list, as JSON.
pub(super) fn listed(entries: &str) -> String {
    let field = string(r#""sidecarList":"#);
    format!("{entries}.map(e, e.substring(e.indexOf({field})))")
}

/// Whether one of these lists has a container; with hot upgrade it has another name in the Pod.
pub(super) fn lists_name(lists: &str, name: &str) -> String {
    let quoted = |name: &str| format!(r#"l.contains('"' + {name} + '"')"#);
    let base = format!("{name}.substring(0, {name}.size() - 2)");
    format!(
        "{lists}.exists(l, {} || {name}.matches('-[12]$') && {})",
        quoted(name),
        quoted(&base)
    )
}
