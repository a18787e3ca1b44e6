//! The words of an expression.

use super::Quantity;

/// Suffixes of quantities.
const UNITS: [&str; 11] = ["m", "k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi"];

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Number(f64),
    Quantity(Quantity),
    /// Name of a variable or function, in lower case.
    Name(String),
    /// `+ - * / ( ) ,`
    Symbol(char),
}

/// Reads the words of a text one by one; `Err` holds a character that cannot begin a word.
#[derive(Clone, Debug)]
pub(super) struct Lexer<'a> {
    rest: &'a str,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { rest: text }
    }

    /// Takes the characters from the front for as long as `belongs`.
    fn take_while(&mut self, mut belongs: impl FnMut(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !belongs(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    /// A number or quantity. A malformed one counts as 0, as in upstream.
    fn number(&mut self) -> Token {
        let all = self.rest;
        let mut previous = '0';
        self.take_while(|c| {
            let exponent = matches!(previous, 'e' | 'E');
            previous = c;
            c.is_ascii_digit() || matches!(c, '.' | '%' | 'e' | 'E') || (exponent && matches!(c, '+' | '-'))
        });
        self.take_while(|c| c.is_ascii_alphabetic());
        let length = all.len() - self.rest.len();
        parse_number(all.get(..length).unwrap_or_default())
    }
}

fn parse_number(word: &str) -> Token {
    let letters = word.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len();
    let suffix = word.get(letters..).unwrap_or_default();
    if UNITS.contains(&suffix) {
        return Quantity::parse(word).map_or(Token::Number(0.0), Token::Quantity);
    }
    let parse = |text: &str| text.parse().ok().filter(|number: &f64| number.is_finite());
    let number = match word.strip_suffix('%') {
        Some(percentage) => parse(percentage).map(|number| number / 100.0),
        None => parse(word),
    };
    Token::Number(number.unwrap_or_default())
}

impl Iterator for Lexer<'_> {
    type Item = Result<Token, char>;

    fn next(&mut self) -> Option<Self::Item> {
        self.take_while(|c| c.is_ascii_whitespace());
        let first = self.rest.chars().next()?;
        Some(match first {
            '+' | '-' | '*' | '/' | '(' | ')' | ',' => {
                let mut first_only = true;
                self.take_while(|_| std::mem::take(&mut first_only));
                Ok(Token::Symbol(first))
            }
            '0'..='9' | '.' => Ok(self.number()),
            'a'..='z' | 'A'..='Z' => {
                let name = self.take_while(|c| c.is_ascii_alphanumeric() || c == '_');
                Ok(Token::Name(name.to_ascii_lowercase()))
            }
            other => Err(other),
        })
    }
}
